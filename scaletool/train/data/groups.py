"""Rows put together once, before training: packed rows, and batches under a token budget.

The groups are made from lengths alone and do not depend on epoch or world size, so the order can treat a group like a
row: every invariant of the order holds for them as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

WINDOW_ROWS = 1 << 16  # rows that are put together at a time
CANDIDATES = 8  # open packed rows of one free length that are looked at
PAD_MULTIPLE = 8  # tensor cores want lengths in multiples of 8
TARGET_SPARE = 1.5  # at 1.1 a tenth more packed rows of the standard library stay open on the source side


@dataclass(frozen=True)
class Groups:
    """Rows by group: group g holds members[starts[g]:starts[g + 1]].

    halves: shape (groups,), of packed rows: how many of the members fill the first half of the slots, where the others
    fit in the second; 0 where a row needs more than a half. None for other groups.
    """

    starts: np.ndarray
    members: np.ndarray
    halves: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def rows(self, group: int) -> np.ndarray:
        return self.members[self.starts[group] : self.starts[group + 1]]

    def sums(self, lengths: np.ndarray) -> np.ndarray:
        """Per group the sum of its rows' lengths."""
        return np.add.reduceat(np.asarray(lengths)[self.members], self.starts[:-1])


def pack(sources: np.ndarray, targets: np.ndarray, source_slots: int, target_slots: int, seed: int = 0) -> Groups:
    """Rows of at most `source_slots` and `target_slots` tokens, by best fit, what fills most of a row first.

    Short rows that are not needed to fill up behind long ones are packed into halves, two of which are a packed row:
    laid out as two rows, they cost half the attention.
    sources, targets: shape (rows,), tokens of each.
    """
    groups: list[list[int]] = []
    halves: list[int] = []
    for window in _windows(len(sources), seed):
        share = np.asarray(sources)[window] / source_slots + np.asarray(targets)[window] / target_slots
        window = window[np.argsort(-share, kind="stable")]
        by_free: list[list[int]] = [[] for _ in range(source_slots + 1)]  # open groups by free source slots
        free_targets: list[int] = []
        opened: list[list[int]] = []
        whole: list[bool] = []
        for row in window.tolist():
            source, target = int(sources[row]), int(targets[row])
            group, free = _best_fit(by_free, free_targets, source, target)
            if group is None:
                whole.append(2 * source > source_slots or 2 * target > target_slots)
                parts = 1 if whole[-1] else 2
                group, free = len(opened), source_slots // parts
                opened.append([])
                free_targets.append(target_slots // parts)
            else:
                by_free[free].remove(group)
            opened[group].append(row)
            free_targets[group] -= target
            by_free[free - source].append(group)
        long = [group for group, is_whole in zip(opened, whole, strict=True) if is_whole]
        short = [group for group, is_whole in zip(opened, whole, strict=True) if not is_whole]
        short += [[]] * (len(short) % 2)
        pairs = list(zip(short[::2], short[1::2], strict=True))
        groups += long + [first + second for first, second in pairs]
        halves += [0] * len(long) + [len(first) for first, _ in pairs]
    return replace(_joined(groups), halves=np.array(halves, dtype=np.int64))


def work_of_packed(packed: Groups, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """What to sort packed rows by, so that those in halves come together, and within both kinds like lengths do."""
    tokens: np.ndarray = packed.sums(sources).astype(np.int64) + packed.sums(targets)
    return tokens + (packed.halves == 0) * (tokens.max() + 1)


def cut_by_tokens(sources: np.ndarray, targets: np.ndarray, most_tokens: int, seed: int = 0) -> Groups:
    """Groups of like rows whose padded slots, rows x (longest source + longest target), stay within `most_tokens`.

    A row that is longer alone makes a group of its own.
    """
    groups: list[list[int]] = []
    totals = np.asarray(sources, dtype=np.int64) + np.asarray(targets)
    for window in _windows(len(totals), seed):
        window = window[np.argsort(totals[window], kind="stable")]
        group: list[int] = []
        longest = (0, 0)
        for row in window.tolist():
            own = (padded_length(int(sources[row])), padded_length(int(targets[row])))
            wider = (max(longest[0], own[0]), max(longest[1], own[1]))
            if group and (len(group) + 1) * sum(wider) > most_tokens:
                groups.append(group)
                group, wider = [], own
            group.append(row)
            longest = wider
        groups.append(group)
    return _joined(groups)


def target_slots(sources: np.ndarray, targets: np.ndarray, source_slots: int) -> int:
    """Target slots of a packed row that leave its source slots to fill up first: they are most of the work."""
    share = float(np.sum(targets, dtype=np.int64)) / max(1.0, float(np.sum(sources, dtype=np.int64)))
    return padded_length(max(int(source_slots * share * TARGET_SPARE), int(np.max(targets))))


def _windows(rows: int, seed: int) -> list[np.ndarray]:
    """Stretches of the source order; within each, equals stand in random order."""
    random = np.random.default_rng(seed)
    windows = []
    for start in range(0, rows, WINDOW_ROWS):
        window = np.arange(start, min(start + WINDOW_ROWS, rows))
        random.shuffle(window)
        windows.append(window)
    return windows


def _best_fit(by_free: list[list[int]], free_targets: list[int], source: int, target: int) -> tuple[int | None, int]:
    """The open group with the least free source slots that takes the row, and those slots; None where none does."""
    for free in range(source, len(by_free)):
        for group in by_free[free][-CANDIDATES:]:
            if free_targets[group] >= target:
                return group, free
    return None, 0


def _joined(groups: list[list[int]]) -> Groups:
    starts = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    members = np.fromiter((row for group in groups for row in group), dtype=np.int64, count=int(starts[-1]))
    return Groups(starts, members)


def padded_length(length: int) -> int:
    """Slots of the longest row of a batch."""
    return -(-length // PAD_MULTIPLE) * PAD_MULTIPLE
