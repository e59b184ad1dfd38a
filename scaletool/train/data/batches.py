"""A rank's share of every global batch, as tensors: the one loader that both modes read.

Every step has exactly `gradient_accumulation_steps` micro-batches on every rank. Where the last
global batch of an epoch is short, its units are dealt evenly and the rest is padding that carries
no loss: every row counts once, all ranks do the same steps, nothing can hang.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from scaletool.errors import ConfigError
from scaletool.train.data.groups import Groups, padded_length
from scaletool.train.data.order import GlobalOrder
from scaletool.train.data.readers import BadRow

IGNORED_LABEL = -100


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes in one forward.

    step counts from 1 over the run. indices: the rows, as places in the data, by packed row where rows are packed,
    else all in one. step_target_tokens counts the real target tokens of the whole global batch, the divisor of its
    mean loss; None where a stream cannot know it ahead.
    """

    epoch: int
    step: int
    micro_step: int
    indices: tuple[tuple[int, ...], ...]
    step_target_tokens: int | None


@dataclass(frozen=True)
class BatchInfo:
    """Host-side facts of a collated micro-batch; padded_tokens counts every slot, padding included.

    bad_rows: what a stream left out, (row number in the data, problem).
    """

    micro: MicroBatch
    rows: tuple[int, ...]
    source_tokens: int
    target_tokens: int
    padded_tokens: int
    bad_rows: tuple[str, ...] = ()


class ShardSampler(Sampler[MicroBatch]):
    """Deals the global batches of `steps` (counted from 0) to one rank.

    target_lengths: shape (rows,), None for a stream. groups: the rows of every unit of the order, None where units
    are rows. packed: a unit is a packed row, not a batch.
    """

    def __init__(
        self,
        order: GlobalOrder,
        target_lengths: Any,
        *,
        rank: int,
        world_size: int,
        per_device_batch_size: int,
        steps: range,
        groups: Groups | None = None,
        packed: bool = False,
    ) -> None:
        self.order, self.target_lengths, self.steps = order, target_lengths, steps
        self.rank, self.world_size, self.per_device_batch_size = rank, world_size, per_device_batch_size
        self.groups, self.packed = groups, packed
        self.micro_steps = order.global_batch_size // (world_size * per_device_batch_size)

    def __len__(self) -> int:
        return len(self.steps) * self.micro_steps

    def __iter__(self) -> Iterator[MicroBatch]:
        width = self.world_size * self.per_device_batch_size
        for step in self.steps:
            batch = self.order.global_batch(step)
            epoch, target_tokens = self.order.locate(step)[0], self._target_tokens(batch)
            for micro_step in range(self.micro_steps):
                dealt = deal(batch[micro_step * width : (micro_step + 1) * width], self.world_size)[self.rank]
                yield MicroBatch(epoch, step + 1, micro_step, self._rows(dealt), target_tokens)

    def _target_tokens(self, batch: np.ndarray) -> int | None:
        if self.target_lengths is None:
            return None
        rows = batch if self.groups is None else np.concatenate([self.groups.rows(unit) for unit in batch])
        return int(self.target_lengths[rows].sum())

    def _rows(self, units: np.ndarray) -> tuple[tuple[int, ...], ...]:
        if self.groups is None:
            return (tuple(units.tolist()),)
        rows = [tuple(self.groups.rows(unit).tolist()) for unit in units]
        if not self.packed:
            return (sum(rows, ()),)
        if self.groups.halves is not None and self.groups.halves[units].all():  # each as two rows of half the slots
            cuts = self.groups.halves[units].tolist()
            rows = [half for row, cut in zip(rows, cuts, strict=True) for half in (row[:cut], row[cut:]) if half]
        return tuple(rows)


def deal(units: np.ndarray, hands: int) -> list[np.ndarray]:
    """Units in order of length to the hands, to and fro: every hand gets nearly the same work."""
    rounds = [units[start : start + hands] for start in range(0, len(units), hands)]
    turned = [units if number % 2 == 0 else units[::-1] for number, units in enumerate(rounds)]
    if turned and len(turned[-1]) < hands:
        turned[-1] = rounds[-1]
    return [np.array([units[hand] for units in turned if hand < len(units)], dtype=np.int64) for hand in range(hands)]


class Collator(Dataset[Any]):
    """Turns a MicroBatch into tensors.

    data: anything with `pairs(indices)`, tokenised or streamed. The tensors:
    input_ids (rows, source slots), decoder_input_ids and labels (rows, target slots), padded in multiples of 8; labels
    are -100 where padded, and the decoder sees the start mark (the pad number, as T5 was trained) and then the labels
    shifted by one. label_places: int64, the places of real labels in labels.view(-1).
    attention_mask (rows, source slots), or, where rows are packed, source_segments and target_segments of the shapes
    of the tokens: 1 for the first example of a row, 2 for the second, 0 for padding.
    info: BatchInfo. A ConfigError (a bad row in a stream) is the item itself: raised in a loader process it would lose
    its form.
    """

    def __init__(self, data: Any, pad_token_id: int, packed: bool = False) -> None:
        self.data, self.pad_token_id, self.packed = data, pad_token_id, packed

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, micro: MicroBatch) -> dict[str, Any] | ConfigError:  # type: ignore[override]
        try:
            found = [self.data.pairs(rows) for rows in micro.indices if rows]
        except ConfigError as error:
            return error
        bad = tuple(str(entry) for row in found for entry in row if isinstance(entry, BadRow))
        rows = [[entry for entry in row if not isinstance(entry, BadRow)] for row in found]
        if not self.packed:
            rows = [[pair] for row in rows for pair in row]
        rows = [row for row in rows if row]
        sources, source_segments = filled([[pair.source for pair in row] for row in rows], self.pad_token_id)
        labels, target_segments = filled([[pair.target for pair in row] for row in rows], IGNORED_LABEL)
        starts = (np.diff(target_segments, axis=1, prepend=0) != 0) & (target_segments != 0)
        decoder_inputs = np.full_like(labels, self.pad_token_id)
        decoder_inputs[:, 1:] = np.where(labels[:, :-1] == IGNORED_LABEL, self.pad_token_id, labels[:, :-1])
        decoder_inputs[starts] = self.pad_token_id  # every example begins with the start mark
        arrays = {
            "input_ids": sources,
            "decoder_input_ids": decoder_inputs,
            "labels": labels,
            "label_places": np.flatnonzero(labels != IGNORED_LABEL),
        }
        if self.packed:
            arrays |= {"source_segments": source_segments, "target_segments": target_segments}
        else:
            arrays["attention_mask"] = source_segments
        pairs = [pair for row in rows for pair in row]
        info = BatchInfo(
            micro,
            rows=tuple(pair.number for pair in pairs),
            source_tokens=sum(len(pair.source) for pair in pairs),
            target_tokens=sum(len(pair.target) for pair in pairs),
            padded_tokens=sources.size + labels.size,
            bad_rows=bad,
        )
        return {**{name: torch.from_numpy(array) for name, array in arrays.items()}, "info": info}


def filled(rows: Sequence[Sequence[np.ndarray]], padding: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segments), int64, of the texts of every row behind each other. Without any row: one row of padding."""
    widest = max([sum(map(len, row)) for row in rows], default=1)
    shape = (max(1, len(rows)), padded_length(widest))
    tokens, segments = np.full(shape, padding, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for place, row in enumerate(rows):
        at = 0
        for number, text in enumerate(row, start=1):
            end = at + len(text)
            tokens[place, at:end], segments[place, at:end] = text, number
            at = end
    return tokens, segments


def make_loader(
    data: Any, sampler: Sequence[MicroBatch] | ShardSampler, pad_token_id: int, *, num_workers: int = 0
) -> DataLoader[dict[str, Any]]:
    """The loader of one rank. It is final: never hand it to `accelerator.prepare`, which would shard it again."""
    # Not fork: gloo, NCCL and Arrow have threads running by now, and a lock that one of them holds at the moment of a
    # fork stays shut in the child. The server starts clean and imports this module once for all its workers.
    workers = multiprocessing.get_context("forkserver") if num_workers else None
    if workers:
        workers.set_forkserver_preload([__name__])
    return DataLoader(
        Collator(data, pad_token_id, getattr(sampler, "packed", False)),
        sampler=sampler,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if num_workers else None,
        worker_init_fn=_end_with_training if num_workers else None,
    )


def _end_with_training(_worker: int) -> None:
    """A loader process ends when its training process is gone, however that ended.

    torch watches the parent, which is the fork server here; and that lives as long as its workers do.
    """
    training = multiprocessing.parent_process()

    def watch() -> None:
        if training is not None:
            training.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
