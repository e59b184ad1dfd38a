"""From measured runs to ratios, as pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scaletool.sweep.stats import ratio

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""The runs of every program, one per round."""


def imbalance(steps: Iterable[Sequence[int]]) -> float:
    """Mean over steps of the busiest rank's tokens / the mean rank's. steps: the tokens of every rank, by step."""
    return statistics.fmean(max(step) * len(step) / max(1, sum(step)) for step in steps)


def step_ratios(found: Runs, ours: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(ratios of real tokens per second, which programs `best` and `thread` are).

    best: the fastest of `ours` ("batching/mode"). thread: the faster of the thread's two programs.
    """
    speeds = {name: [run["real_tokens_per_second"] for run in runs] for name, runs in found.items()}

    def fastest(names: Iterable[str]) -> str:
        return max(names, key=lambda name: statistics.median(speeds[name]))

    best, thread = fastest(ours), fastest(("thread_custom", "thread_trainer"))
    batching = best.split("/")[0]
    pairs = {
        "best/thread": (best, thread),
        "best/stock_dynamic": (best, "stock_dynamic"),
        "best/stock_grouped": (best, "stock_grouped"),
        "trainer/custom": (f"{batching}/trainer", f"{batching}/custom"),
        "custom/bare": ("bucketed/custom", "bare"),
    }
    ratios = {name: ratio(speeds[above], speeds[below]).to_dict() for name, (above, below) in pairs.items()}
    return ratios, {"best": best, "thread": thread}
