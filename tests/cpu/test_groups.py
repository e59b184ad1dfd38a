"""Rows put together ahead: every row once, limits kept, little waste."""

from __future__ import annotations

import numpy as np
import pytest

from scaletool.train.data import groups
from scaletool.train.data.batches import ShardSampler
from scaletool.train.data.groups import Groups, cut_by_tokens, pack, target_slots, work_of_packed
from scaletool.train.data.order import GlobalOrder

SOURCES = np.minimum(np.random.default_rng(0).lognormal(4.6, 1.0, 6000).astype(np.int32) + 1, 256)
TARGETS = np.minimum(np.random.default_rng(1).lognormal(3.6, 0.6, 6000).astype(np.int32) + 1, 64)
"""Ragged as functions and their docstrings are, many of them cut at the limits."""


def check_coverage(made: Groups, rows: int) -> None:
    assert sorted(made.members.tolist()) == list(range(rows))
    assert [row for group in range(len(made)) for row in made.rows(group).tolist()] == made.members.tolist()
    assert all(len(made.rows(group)) for group in range(len(made)))


def rounded(length: int) -> int:
    return -(-length // 8) * 8


def slots(made: Groups, group: int, sources: np.ndarray, targets: np.ndarray) -> int:
    rows = made.rows(group)
    return len(rows) * (rounded(sources[rows].max()) + rounded(targets[rows].max()))


@pytest.mark.parametrize("rows", [1, 2, 7, 500, 3000])
@pytest.mark.parametrize("window", [1 << 16, 64])
def test_packed_rows_keep_their_limits(rows: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WINDOW_ROWS", window)
    sources, targets = SOURCES[:rows], TARGETS[:rows]
    made = pack(sources, targets, 256, 96)
    check_coverage(made, rows)
    assert made.sums(sources).max() <= 256
    assert made.sums(targets).max() <= 96


@pytest.mark.parametrize("window", [1 << 16, 64])
def test_halves_of_packed_rows_fit_in_half_the_slots(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WINDOW_ROWS", window)
    made = pack(SOURCES, TARGETS, 256, 96)
    assert made.halves is not None
    assert 0.02 < np.mean(made.halves > 0) < 0.98
    for group in np.flatnonzero(made.halves):
        rows = made.rows(group)
        for half in (rows[: made.halves[group]], rows[made.halves[group] :]):
            assert SOURCES[half].sum() <= 128
            assert TARGETS[half].sum() <= 48
    work = work_of_packed(made, SOURCES, TARGETS)
    assert work[made.halves > 0].max() < work[made.halves == 0].min()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_short_packed_rows_are_dealt_as_two_rows_of_half_the_slots(world_size: int) -> None:
    made = pack(SOURCES, TARGETS, 256, 96)
    order = GlobalOrder(len(made), 4 * world_size, lengths=work_of_packed(made, SOURCES, TARGETS))
    seen: list[int] = []
    folded = 0
    for rank in range(world_size):
        sampler = ShardSampler(
            order,
            TARGETS,
            rank=rank,
            world_size=world_size,
            per_device_batch_size=4,
            steps=range(order.steps_per_epoch),
            groups=made,
            packed=True,
        )
        for micro in sampler:
            longest = max(int(SOURCES[list(row)].sum()) for row in micro.indices)
            folded += len(micro.indices) > 4
            assert longest <= (256 if len(micro.indices) <= 4 else 128)
            seen += [row for rows in micro.indices for row in rows]
    assert sorted(seen) == list(range(len(SOURCES)))
    assert folded > 10


@pytest.mark.parametrize("source_slots", [256, 512, 1024])
def test_packed_rows_leave_little_room(source_slots: int) -> None:
    room = target_slots(SOURCES, TARGETS, source_slots)
    made = pack(SOURCES, TARGETS, source_slots, room)
    assert made.sums(SOURCES).sum() / (len(made) * source_slots) > 0.95
    assert room % 8 == 0
    assert room >= TARGETS.max()


def test_rows_as_long_as_the_slots_stay_alone() -> None:
    made = pack(np.full(9, 256), np.full(9, 8), 256, 64)
    assert len(made) == 9
    made = pack(np.full(10, 128), np.full(10, 64), 256, 64)  # two sources would fit, not two targets
    assert len(made) == 10
    made = pack(np.full(10, 128), np.full(10, 32), 256, 64)
    assert len(made) == 5


@pytest.mark.parametrize(
    "make", [lambda s, t, seed: pack(s, t, 256, 96, seed), lambda s, t, seed: cut_by_tokens(s, t, 2048, seed)]
)
def test_groups_follow_lengths_and_seed_alone(make) -> None:  # type: ignore[no-untyped-def]
    first, same, other = (make(SOURCES[:900], TARGETS[:900], seed) for seed in (0, 0, 1))
    assert np.array_equal(first.members, same.members)
    assert np.array_equal(first.starts, same.starts)
    assert not np.array_equal(first.members, other.members)


@pytest.mark.parametrize("most_tokens", [16, 320, 1024, 8192])
@pytest.mark.parametrize("rows", [1, 5, 2000])
@pytest.mark.parametrize("window", [1 << 16, 100])
def test_batches_keep_their_budget(rows: int, most_tokens: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WINDOW_ROWS", window)
    sources, targets = SOURCES[:rows], TARGETS[:rows]
    made = cut_by_tokens(sources, targets, most_tokens)
    check_coverage(made, rows)
    for group in range(len(made)):
        assert len(made.rows(group)) == 1 or slots(made, group, sources, targets) <= most_tokens


def test_batches_use_most_of_their_budget() -> None:
    made = cut_by_tokens(SOURCES, TARGETS, 8192)
    total = sum(slots(made, group, SOURCES, TARGETS) for group in range(len(made)))
    assert total / (len(made) * 8192) > 0.9
    assert (SOURCES.sum() + TARGETS.sum()) / total > 0.75
