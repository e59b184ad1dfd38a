"""The benchmark's arithmetic, and the house rules for its programs. Its programs run in tests/dist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, run
from benchmarks.figures import imbalance, step_ratios

FOLDER = Path(run.__file__).parent
LONGEST_FUNCTION = 60
RATIOS = {"best/thread", "best/stock_dynamic", "best/stock_grouped", "trainer/custom", "custom/bare"}


def runs(*speeds: float) -> list[dict[str, Any]]:
    return [
        {"real_tokens_per_second": speed, "padding_share": 0.5, "imbalance": 1.25, "peak_bytes": 100}
        for speed in speeds
    ]


@pytest.fixture
def found() -> dict[str, list[dict[str, Any]]]:
    """Rounds 1 and 2 of all programs; round 2 was half as fast for everyone."""
    speeds = {name: 100.0 for name in run.PROGRAMS} | {"thread_custom": 10.0, "thread_trainer": 20.0, "bare": 80.0}
    speeds |= {"packed/custom": 400.0, "packed/trainer": 200.0}
    return {name: runs(speed, speed / 2) for name, speed in speeds.items()}


def test_ratios_are_paired_by_round(found: dict[str, list[dict[str, Any]]]) -> None:
    ratios, which = step_ratios(found, run.OURS)
    assert which == {"best": "packed/custom", "thread": "thread_trainer"}
    assert set(ratios) == RATIOS
    assert ratios["best/thread"] == pytest.approx({"median": 20.0, "low": 20.0, "high": 20.0, "rounds": 2})
    assert ratios["best/stock_dynamic"]["median"] == ratios["best/stock_grouped"]["median"] == 4.0
    assert ratios["trainer/custom"]["median"] == 0.5
    assert ratios["custom/bare"]["median"] == 1.25


def test_imbalance_is_the_mean_over_steps() -> None:
    assert imbalance([(10, 10), (30, 10)]) == pytest.approx(1.25)
    assert imbalance([(7,), (9,)]) == 1.0


def test_summary_takes_medians_and_an_interval() -> None:
    found = report.summary(runs(90.0, 100.0, 120.0))
    speed = found["real_tokens_per_second"]
    assert speed["median"] == 100.0 and speed["low"] < 100.0 < speed["high"] and speed["rounds"] == 3
    assert (found["padding_share"], found["imbalance"], found["peak_bytes"]) == (0.5, 1.25, 100)


@pytest.mark.parametrize("processes", [1, 2])
def test_whole_length_groups_are_measured(processes: int) -> None:
    """50 batches of a process, which Trainer deals to the processes."""
    assert run.steps_of("stock_grouped", run.STEPS, processes) * processes == 50


def test_every_program_has_steps() -> None:
    assert all(run.steps_of(name, steps, 2) >= 1 for name in run.PROGRAMS for steps in (1, run.STEPS))


def test_every_program_is_explained_on_the_page() -> None:
    assert {name.split("/")[0] for name in run.PROGRAMS} == set(report.MEANING)


def test_peers_name_modules_that_exist() -> None:
    for module, *_ in run.PEERS.values():
        assert (FOLDER.parent / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or node.lineno) - node.lineno < LONGEST_FUNCTION, f"{path.name} {node.name}"


def test_what_cannot_be_measured_is_not_shown(found: dict[str, list[dict[str, Any]]]) -> None:
    ratios, _ = step_ratios({name: own[:1] for name, own in found.items()}, run.OURS)
    text = "\n".join(report._ratios({"ratios": ratios}))
    assert re.search(r"\| best/thread \| 20\.000 \| - \| 1 \|", text)
    assert "imbalance_8" not in "\n".join(report._measures({"measures": {"imbalance_8": None}}))
