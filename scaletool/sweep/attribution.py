"""Where the missing speed of a cell went, in parts that add up to 1 - efficiency."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scaletool.sweep.stats import measured_steps


def wait_shares(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the step time, mean over rounds: waiting for data (mean over ranks), and for the slowest rank
    (slowest minus mean rank time, where the ranks' own times differ at all: collectives even most of it out)."""
    data_wait, slowest = [], []
    for record in records:
        steps = measured_steps(record)
        seconds = sum(step["seconds"] for step in steps)
        data_wait.append(sum(step["data_wait_seconds"] for step in steps) / seconds)
        ranks = [rank["seconds"][record.get("warmup_steps", 0) :] for rank in record["ranks"]]
        means = [statistics.fmean(times) for times in zip(*ranks, strict=True)]
        slowest.append(sum(step["seconds"] - mean for step, mean in zip(steps, means, strict=True)) / seconds)
    return {"data_wait": statistics.fmean(data_wait), "slowest_rank": statistics.fmean(slowest)}


def missing_speed(
    cell: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]], efficiency: float
) -> dict[str, float]:
    """Split 1 - efficiency. A part is share - efficiency x the baseline's share (work that the baseline does too is not
    missing); the rest cannot be told apart
    without a run that leaves communication out, and is named so."""
    here, there = wait_shares(cell), wait_shares(baseline)
    parts = {name: here[name] - efficiency * there[name] for name in ("data_wait", "slowest_rank")}
    return {**parts, "communication_and_other": 1.0 - efficiency - sum(parts.values())}
