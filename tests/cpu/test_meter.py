"""The meter in one process: rows per step, the measured window, counts, and the join over ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from scaletool.errors import RunError
from scaletool.train import meter as meter_module
from scaletool.train.data.batches import BatchInfo, MicroBatch
from scaletool.train.meter import Meter, all_gather

CPU = torch.device("cpu")


class Clock:
    """Stands still until told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


@pytest.fixture
def make() -> Callable[..., Meter]:
    def build(**changes: Any) -> Meter:
        return Meter(CPU, **{"log_every": 10, "warmup_steps": 0, "on_log": lambda row: None, **changes})

    return build


def batch(step: int, micro_step: int, rows: Iterable[int]) -> dict[str, Any]:
    rows = tuple(rows)
    info = BatchInfo(MicroBatch(0, step, micro_step, rows, 99), rows, 10 * len(rows), 3 * len(rows), 16 * len(rows))
    return {"info": info}


def drive(
    meter: Meter, clock: Clock, steps: int, *, micro_steps: int = 1, wait: float = 0.5, work: float = 2.0
) -> None:
    """`steps` steps whose micro-batches take `wait` to come and `work` to compute, with a loss share of 1 each."""

    def loader() -> Iterable[dict[str, Any]]:
        for step in range(1, steps + 1):
            for micro_step in range(micro_steps):
                clock.now += wait
                yield batch(step, micro_step, range(4))

    for number, _ in enumerate(meter.watch(loader()), start=1):
        clock.now += work
        meter.micro_step(torch.tensor(1.0))
        if number % micro_steps == 0:
            meter.step(grad_norm=torch.tensor(0.25), learning_rate=0.1, loss_scale=None, skipped=False)


def test_rows_of_steps(make: Callable[..., Meter], clock: Clock) -> None:
    meter = make()
    drive(meter, clock, 3, micro_steps=2)
    steps, ranks, window = meter.finish()
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step == {
            "step": step["step"],
            "loss": 2.0,
            "grad_norm": 0.25,
            "learning_rate": 0.1,
            "loss_scale": None,
            "skipped": False,
            "seconds": pytest.approx(5.0),
            "data_wait_seconds": pytest.approx(1.0),
            "samples": 8,
            "source_tokens": 80,
            "target_tokens": 24,
            "padded_tokens": 128,
        }
    assert window == {
        "seconds": pytest.approx(15.0),
        "steps": 3,
        "samples": 24,
        "real_tokens": 312,
        "padded_tokens": 384,
    }
    (rank,) = ranks
    assert rank["rank"] == 0
    assert rank["seconds"] == pytest.approx([5.0] * 3)
    assert rank["data_wait_seconds"] == pytest.approx([1.0] * 3)
    assert rank["peak_memory_bytes"] > 0


def test_warmup_is_left_out_of_the_window_only(make: Callable[..., Meter], clock: Clock) -> None:
    meter = make(warmup_steps=2)
    drive(meter, clock, 5)
    steps, _, window = meter.finish()
    assert len(steps) == 5
    assert (window["steps"], window["samples"]) == (3, 12)
    assert window["seconds"] == pytest.approx(7.5)


def test_window_is_the_sum_of_its_steps(make: Callable[..., Meter], clock: Clock) -> None:
    meter = make(warmup_steps=1)
    drive(meter, clock, 4)
    steps, _, window = meter.finish()
    assert window["seconds"] == pytest.approx(sum(step["seconds"] for step in steps[1:]))


def test_time_before_the_loop_belongs_to_no_step(make: Callable[..., Meter], clock: Clock) -> None:
    meter = make()
    clock.now += 1000
    drive(meter, clock, 2)
    steps, _, window = meter.finish()
    assert steps[0]["seconds"] == pytest.approx(2.5)
    assert window["seconds"] == pytest.approx(5.0)


def test_validation_time_is_left_out(make: Callable[..., Meter], clock: Clock) -> None:
    meter = make()
    for step in (1, 2):
        for _ in meter.watch([batch(step, 0, [0])]):
            clock.now += 2
            meter.micro_step(torch.tensor(1.0))
            meter.step(grad_norm=None, learning_rate=0.1, loss_scale=None, skipped=False)
            if step == 1:
                with meter.excluded():
                    clock.now += 50
                opened = meter.window_start
    assert opened == 150.0
    steps, _, _ = meter.finish()
    assert [step["seconds"] for step in steps] == pytest.approx([2, 2])


def test_loss_waits_for_the_device_at_log_steps_only(make: Callable[..., Meter], clock: Clock) -> None:
    logged: list[dict[str, Any]] = []
    meter = make(log_every=3, on_log=lambda row: logged.append(dict(row)))
    drive(meter, clock, 5)
    assert [row["step"] for row in logged] == [1, 3]
    assert [row["loss"] for row in logged] == [1.0, 1.0]
    assert [isinstance(row["loss"], torch.Tensor) for row in meter.rows] == [False] * 3 + [True] * 2
    steps, _, _ = meter.finish()
    assert [step["loss"] for step in steps] == [1.0] * 5
    json.dumps(steps)


def test_shares_are_summed_without_their_graph(make: Callable[..., Meter]) -> None:
    meter = make(log_every=1)
    for share in (0.5, 0.25, 1.0):
        meter.micro_step(torch.tensor(share, requires_grad=True))
    meter.step(grad_norm=1.0, learning_rate=0.1, loss_scale=8.0, skipped=False)
    assert meter.rows[0]["loss"] == 1.75
    meter.micro_step(torch.tensor(2.0))
    meter.step(grad_norm=1.0, learning_rate=0.1, loss_scale=8.0, skipped=False)
    assert meter.rows[1]["loss"] == 2.0


def test_loss_that_is_no_number(make: Callable[..., Meter]) -> None:
    meter = make(log_every=10)
    for loss in (1.0, float("nan")):
        meter.micro_step(torch.tensor(loss))
        meter.step(grad_norm=1.0, learning_rate=0.1, loss_scale=None, skipped=False)
    with pytest.raises(RunError, match="step 2 has loss nan") as caught:
        meter.finish()
    assert caught.value.outcome == "diverged"


def test_skipped_step_may_have_no_loss(make: Callable[..., Meter]) -> None:
    meter = make()
    meter.micro_step(torch.tensor(float("nan")))
    meter.step(grad_norm=torch.tensor(float("inf")), learning_rate=0.1, loss_scale=4096.0, skipped=True)
    steps, _, _ = meter.finish()
    assert steps[0]["skipped"] is True
    assert steps[0]["loss_scale"] == 4096.0


def test_samples_file_has_a_line_per_micro_step(make: Callable[..., Meter], clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "samples.rank0.jsonl"
    meter = make(samples_path=path)
    drive(meter, clock, 2, micro_steps=2)
    meter.finish()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["micro_step"]) for line in lines] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert lines[0] == {"epoch": 0, "step": 1, "micro_step": 0, "rows": [0, 1, 2, 3]}


def test_join_over_ranks() -> None:
    first = {"step": 1, "loss": 2.0, "seconds": 1.0, "data_wait_seconds": 0.5, **dict.fromkeys(meter_module.COUNTS, 3)}
    second = {**first, "seconds": 4.0, "data_wait_seconds": 0.1, **dict.fromkeys(meter_module.COUNTS, 5)}
    joined = meter_module._join([first, second])
    assert joined["seconds"] == 4.0  # the slowest
    assert joined["data_wait_seconds"] == pytest.approx(0.3)  # the mean
    assert [joined[name] for name in meter_module.COUNTS] == [8] * 4  # the sum
    assert joined["loss"] == 2.0


def test_gather_of_one_process() -> None:
    assert all_gather({"a": 1}) == [{"a": 1}]
