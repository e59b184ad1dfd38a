"""Figures with error bars, as pure functions. The unit of replication is the round: steps of one launch are not
independent of each other, launches are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Two-sided 95% quantiles of Student's t by degrees of freedom (any table; beyond 30 the normal's 1.96 is near enough).
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Estimate:
    """A median with its 95% interval; low and high are None with fewer than two rounds."""

    median: float
    low: float | None
    high: float | None
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        return {"median": self.median, "low": self.low, "high": self.high, "rounds": self.rounds}

    def scaled(self, factor: float) -> Estimate:
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.median * factor, low, high, self.rounds)

    @property
    def differs_from_one(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 1 or self.high < 1)


def estimate(values: Sequence[float]) -> Estimate:
    """Median of positive figures; interval exp(mean(log x) +- t * sd(log x) / sqrt(n)), n rounds, n - 1 degrees."""
    middle = statistics.median(values)
    count = len(values)
    if count < 2:
        return Estimate(middle, None, None, count)
    logs = [math.log(value) for value in values]
    half = t_quantile(count - 1) * statistics.stdev(logs) / math.sqrt(count)
    centre = statistics.fmean(logs)
    return Estimate(middle, min(middle, math.exp(centre - half)), max(middle, math.exp(centre + half)), count)


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """above / below, paired by round: what disturbs a whole round cancels."""
    return estimate([over / under for over, under in zip(above, below, strict=True)])


def t_quantile(degrees: int) -> float:
    return T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else 1.960


def rates(record: Mapping[str, Any]) -> dict[str, float]:
    """Counted work / wall seconds of the measured window (end to end, the slowest rank's), per second."""
    window = record["window"]
    names = {"samples": "samples", "real_tokens": "real_tokens", "padded_tokens": "padded_tokens"}
    return {f"{name}_per_second": window[key] / window["seconds"] for name, key in names.items()}


def measured_steps(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps after warm-up."""
    return list(record["steps"][record.get("warmup_steps", 0) :])
