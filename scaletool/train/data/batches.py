"""A rank's share of every global batch, as padded tensors: the one loader that both modes read.

Every step has exactly `gradient_accumulation_steps` micro-batches on every rank. Where the last
global batch of an epoch is short, its rows are dealt evenly and the rest is padding that carries
no loss: every row counts once, all ranks do the same steps, nothing can hang.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from scaletool.train.data.order import GlobalOrder
from scaletool.train.data.tokenise import TokenisedData

PAD_MULTIPLE = 8  # tensor cores want lengths in multiples of 8
IGNORED_LABEL = -100


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes in one forward.

    step counts from 1 over the run; rows are source-order row numbers, indices places in the tokenised data;
    step_target_tokens counts the real target tokens of the whole global batch: the divisor of its mean loss.
    """

    epoch: int
    step: int
    micro_step: int
    indices: tuple[int, ...]
    step_target_tokens: int


@dataclass(frozen=True)
class BatchInfo:
    """Host-side facts of a collated micro-batch; padded_tokens counts every slot, padding included."""

    micro: MicroBatch
    rows: tuple[int, ...]
    source_tokens: int
    target_tokens: int
    padded_tokens: int


class ShardSampler(Sampler[MicroBatch]):
    """Deals the global batches of `steps` (counted from 0) to one rank."""

    def __init__(
        self,
        order: GlobalOrder,
        target_lengths: np.ndarray,
        *,
        rank: int,
        world_size: int,
        per_device_batch_size: int,
        steps: range,
    ) -> None:
        self.order, self.target_lengths, self.steps = order, target_lengths, steps
        self.rank, self.world_size, self.per_device_batch_size = rank, world_size, per_device_batch_size
        self.micro_steps = order.global_batch_size // (world_size * per_device_batch_size)

    def __len__(self) -> int:
        return len(self.steps) * self.micro_steps

    def __iter__(self) -> Iterator[MicroBatch]:
        width = self.world_size * self.per_device_batch_size
        for step in self.steps:
            batch = self.order.global_batch(step)
            target_tokens = int(self.target_lengths[batch].sum())
            for micro_step in range(self.micro_steps):
                # Rows of a batch stand in order of length: dealt like cards, every rank gets the like of the others.
                dealt = batch[micro_step * width : (micro_step + 1) * width][self.rank :: self.world_size]
                yield MicroBatch(self.order.locate(step)[0], step + 1, micro_step, tuple(dealt.tolist()), target_tokens)


class PaddedBatches(Dataset[dict[str, Any]]):
    """Turns a MicroBatch into tensors.

    input_ids, attention_mask: (examples, source length); labels, decoder_input_ids: (examples, target length), both
    padded to the longest, in multiples of 8. Labels are -100 where padded; the decoder sees the start mark (the pad
    number, as T5 was trained) and then the labels shifted by one. info: BatchInfo.
    """

    def __init__(self, data: TokenisedData, pad_token_id: int) -> None:
        self.data, self.pad_token_id = data, pad_token_id

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, micro: MicroBatch) -> dict[str, Any]:  # type: ignore[override]
        if micro.indices:
            columns = self.data.rows[list(micro.indices)]
        else:  # nothing dealt in a short last batch: one row of padding without any label
            columns = {"row": [], "input_ids": [[self.pad_token_id]], "labels": [[]]}
        sources, targets = columns["input_ids"], columns["labels"]
        input_ids = self._pad(sources, self.pad_token_id)
        labels = self._pad(targets, IGNORED_LABEL)
        decoder_input_ids = torch.full_like(labels, self.pad_token_id)
        decoder_input_ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED_LABEL, self.pad_token_id)
        source_lengths = torch.tensor([len(source) for source in sources])
        attention_mask = (torch.arange(input_ids.shape[1]) < source_lengths[:, None]).long()
        real_sources = int(source_lengths.sum()) if micro.indices else 0
        info = BatchInfo(
            micro,
            tuple(columns["row"]),
            real_sources,
            sum(len(target) for target in targets),
            input_ids.numel() + labels.numel(),
        )
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "labels": labels,
            "info": info,
        }

    def _pad(self, sequences: Sequence[Sequence[int]], value: int) -> torch.Tensor:
        longest = max(1, max(len(sequence) for sequence in sequences))
        padded = np.full((len(sequences), -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE), value, dtype=np.int64)
        for index, sequence in enumerate(sequences):
            padded[index, : len(sequence)] = sequence
        return torch.from_numpy(padded)


def make_loader(
    data: TokenisedData, sampler: ShardSampler, pad_token_id: int, *, num_workers: int = 0
) -> DataLoader[dict[str, Any]]:
    """The loader of one rank. It is final: never hand it to `accelerator.prepare`, which would shard it again."""
    # Not fork: gloo, NCCL and Arrow have threads running by now, and a lock that one of them holds at the moment of a
    # fork stays shut in the child. The server starts clean and imports this module once for all its workers.
    workers = multiprocessing.get_context("forkserver") if num_workers else None
    if workers:
        workers.set_forkserver_preload([__name__])
    return DataLoader(
        PaddedBatches(data, pad_token_id),
        sampler=sampler,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if num_workers else None,
    )
