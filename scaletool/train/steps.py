"""Step accounting: how many steps a run has, worked out once and printed before training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from scaletool.config import RunConfig
from scaletool.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run. A step is an optimizer step of the whole world.

    units: what batches are counted in: rows, packed rows, or batches under a token budget.
    """

    rows: int
    units: int
    world_size: int
    per_device_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    batches_per_rank: int
    steps_per_epoch: int
    optimizer_steps: int
    epochs: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def make_plan(rows: int, world_size: int, config: RunConfig, units: int | None = None) -> Plan:
    """batches_per_rank = ceil(units / (world x batch)); steps = epochs x ceil(batches_per_rank / accumulation).

    units: packed rows, or batches under a token budget; None where units are rows. `train.max_steps` wins over
    `train.epochs`. Raises ConfigError when there are fewer rows than processes.
    """
    batch, accumulation = config.data.per_device_batch_size, config.train.gradient_accumulation_steps
    if rows < world_size:
        raise ConfigError(
            f"{rows} training rows are fewer than {world_size} processes: some would never see one",
            where="data.train",
            hint=f"use at most {rows} processes, or more data",
        )
    batches_per_rank = -(-(units or rows) // (world_size * batch))
    steps_per_epoch = -(-batches_per_rank // accumulation)
    steps = config.train.max_steps or config.train.epochs * steps_per_epoch
    return Plan(
        rows=rows,
        units=units or rows,
        world_size=world_size,
        per_device_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        global_batch_size=world_size * batch * accumulation,
        batches_per_rank=batches_per_rank,
        steps_per_epoch=steps_per_epoch,
        optimizer_steps=steps,
        epochs=round(steps / steps_per_epoch, 4),
    )
