"""From a run config to the batches of one rank: data, order, dealing and plan, the same for both modes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scaletool.config import RunConfig
from scaletool.train.data import groups
from scaletool.train.data.batches import ShardSampler, make_loader
from scaletool.train.data.order import GlobalOrder
from scaletool.train.data.stream import BLOCK_ROWS, StreamedData, load_stream
from scaletool.train.data.tokenise import Progress, TokenisedData, load_data, load_groups
from scaletool.train.steps import Plan, make_plan

SMALLEST_EVAL_BATCH = 8  # examples per GPU: no gradient is kept, and a batch under a token budget counts as one


@dataclass
class Shards:
    """What a rank trains and validates on. notes: what a user should know of the data."""

    plan: Plan
    loader: Any
    validation: Any
    skipped_rows: int = 0
    first_skipped: str | None = None
    notes: list[str] = field(default_factory=list)


def load_shards(
    config: RunConfig,
    cache: Path,
    tokenizer: Any,
    *,
    rank: int,
    world_size: int,
    start_step: int = 0,
    progress: Progress | None = None,
) -> Shards:
    """The loaders of a rank, from optimizer step `start_step` (from 0) on. Raises ConfigError for unusable data."""
    data: TokenisedData | StreamedData
    if config.data.streaming:
        data, held_out = load_stream(config, cache, tokenizer)
    else:
        data, held_out = load_data(config, cache, tokenizer, progress)
    order, plan, grouped = arrange(data, config, world_size)
    share: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "per_device_batch_size": plan.per_device_batch_size,
    }
    sampler = ShardSampler(
        order,
        getattr(data, "target_lengths", None),
        steps=range(start_step, plan.optimizer_steps),
        groups=grouped,
        packed=config.data.batching == "packed",
        **share,
    )
    loader = make_loader(data, sampler, tokenizer.pad_token_id, num_workers=config.data.num_workers)
    validation = None
    if held_out is not None:
        share["per_device_batch_size"] = max(plan.per_device_batch_size, SMALLEST_EVAL_BATCH)
        in_turn = GlobalOrder(len(held_out), world_size * share["per_device_batch_size"], shuffle=False)
        eval_sampler = ShardSampler(in_turn, None, steps=range(in_turn.steps_per_epoch), **share)
        validation = make_loader(held_out, eval_sampler, tokenizer.pad_token_id)
    skipped, first = getattr(data, "skipped_rows", 0), getattr(data, "first_skipped", None)
    notes = [*data.notes, *([f"skipped {skipped} bad rows, the first: {first}"] if skipped else [])]
    return Shards(plan, loader, validation, skipped, first, notes)


def arrange(
    data: TokenisedData | StreamedData, config: RunConfig, world_size: int
) -> tuple[GlobalOrder, Plan, groups.Groups | None]:
    """The order of the data under `data.batching`, the plan, and what its units hold (None: a row each)."""
    settings = config.data
    grouped: groups.Groups | None = None
    lengths: Any = None
    if isinstance(data, StreamedData):
        lengths = data.sizes if settings.batching == "bucketed" else None
    elif settings.batching == "packed":
        grouped = _packs(data, config)
        lengths = groups.work_of_packed(grouped, data.source_lengths, data.target_lengths)
    elif settings.max_batch_tokens is not None:
        grouped = _cut(data, settings.max_batch_tokens)
    elif settings.batching == "bucketed":
        lengths = TotalLengths(data)
    plan = make_plan(len(data), world_size, config, units=None if grouped is None else len(grouped))
    windows: dict[str, Any] = (
        {"block_units": BLOCK_ROWS, "window_units": settings.shuffle_buffer} if settings.streaming else {}
    )
    units = len(data) if grouped is None else len(grouped)
    return GlobalOrder(units, plan.global_batch_size, settings.seed, lengths, **windows), plan, grouped


@dataclass(frozen=True)
class TotalLengths:
    """Source and target tokens of a row, added where they are asked for: their files stay where they are, on disk."""

    data: TokenisedData

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        total: np.ndarray = self.data.source_lengths[rows] + self.data.target_lengths[rows]
        return total


def _cut(data: TokenisedData, most_tokens: int) -> groups.Groups:
    make = partial(groups.cut_by_tokens, data.source_lengths, data.target_lengths, most_tokens)
    return load_groups(data, "batches", {"most_tokens": most_tokens}, make)


def _packs(data: TokenisedData, config: RunConfig) -> groups.Groups:
    slots = config.data.pack_tokens or config.data.max_source_tokens
    targets = groups.target_slots(data.source_lengths, data.target_lengths, slots)
    make = partial(groups.pack, data.source_lengths, data.target_lengths, slots, targets)
    return load_groups(data, "packed", {"slots": [slots, targets]}, make)
