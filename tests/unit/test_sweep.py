"""The schedule with a scripted executor: failures, resume, interruption, reports."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from records import good_record

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.record import CPU_STAMP, write_json
from scaletool.sweep import report
from scaletool.sweep.command import Launch, Machine
from scaletool.sweep.executors import Ended, FakeExecutor
from scaletool.sweep.matrix import make_cells
from scaletool.sweep.report import FORMATS, print_table, table_rows, tables, write_reports
from scaletool.sweep.run import Sweep, dry_run_lines, open_folder, run_sweep

CPU = Machine((), 2)


def plan(out: Path, gpus: Sequence[int] = (1, 2), rounds: int = 2, profiles: Sequence[str] = ("ddp",)) -> Sweep:
    config = RunConfig().replace(measure__rounds=rounds, measure__steps=4, measure__warmup_steps=2)
    return Sweep(tuple(make_cells(gpus, profiles, ["custom", "trainer"], ["weak"], config)), config, out, CPU)


def worker(speed: Callable[[dict[str, Any]], float] = lambda config: 0.1) -> FakeExecutor:
    """Writes a good record for every launch, its step time by run.json."""

    def script(launch: Launch) -> Ended:
        config = json.loads(Path(launch.arguments[-1]).read_text())
        record = good_record(speed(config), gpus=config["launch"]["world_size"], stamp=CPU_STAMP)
        write_json(Path(config["train"]["output_dir"]) / "record.json", record)
        return Ended(0, 1.0)

    return FakeExecutor(script)


def go(sweep: Sweep, executor: FakeExecutor, *, resume: bool = False) -> dict[str, Any]:
    open_folder(sweep, resume=resume)
    run_sweep(sweep, executor, before_cell=lambda *_: None, after_cell=lambda *_: None)
    return write_reports(sweep.out)


def test_speedup_efficiency_and_mode_ratio_by_hand(tmp_path: Path) -> None:
    # custom: 0.1 s on 1, 0.125 s on 2: tokens/s x 2 / 1.25 = 1.6, efficiency 80%. trainer: twice as slow on 1.
    times = {("custom", 1): 0.1, ("custom", 2): 0.125, ("trainer", 1): 0.2, ("trainer", 2): 0.2}
    summary = go(plan(tmp_path), worker(lambda c: times[c["train"]["mode"], c["launch"]["world_size"]]))
    cell = summary["cells"]["ddp-custom-weak-2gpu"]
    assert cell["speedup"]["median"] == pytest.approx(1.6)
    assert cell["efficiency"]["median"] == pytest.approx(0.8)
    assert sum(cell["missing"].values()) == pytest.approx(0.2)
    assert summary["mode_ratios"][0]["trainer/custom"]["median"] == pytest.approx(0.5)
    assert any("1 -> 2 processes, ddp custom" in line and "efficiency 80%" in line for line in summary["verdicts"])
    assert summary["stamps"] == [CPU_STAMP]


def test_a_failed_cell_stops_nothing_and_says_why(tmp_path: Path) -> None:
    good = worker()

    def script(launch: Launch) -> Ended:
        out = Path(launch.arguments[-1]).parent
        if "ddp-trainer-weak-2gpu" in str(out):
            (out / "stderr.log").write_text("lines\nRuntimeError: boom\nmore\n")
            return Ended(1, 1.0)
        return good.script(launch)

    executor = FakeExecutor(script)
    summary = go(plan(tmp_path), executor)
    assert len(executor.launched) == 8
    failed = summary["cells"]["ddp-trainer-weak-2gpu"]
    assert failed["outcomes"] == {"crashed": 2}
    assert "RuntimeError: boom" in failed["reason"]
    assert summary["cells"]["ddp-custom-weak-2gpu"]["rounds_ok"] == 2
    record = json.loads((tmp_path / "cells/ddp-trainer-weak-2gpu/r1/record.json").read_text())
    assert record["log_tail"] == ["lines", "RuntimeError: boom", "more"]


def test_the_first_rank_that_left_word_is_believed(tmp_path: Path) -> None:
    def script(launch: Launch) -> Ended:
        failure = {"outcome": "oom", "reason": "CUDA out of memory", "rank": 1, "exit_status": 3}
        write_json(Path(launch.arguments[-1]).parent / "failure.rank1.json", failure)
        return Ended(1, 1.0)

    cell = go(plan(tmp_path, rounds=1), FakeExecutor(script))["cells"]["ddp-custom-weak-1gpu"]
    assert cell["outcomes"] == {"oom": 1}
    assert cell["reason"] == "rank 1: CUDA out of memory"


@pytest.mark.parametrize("timed_out", [False, True])
def test_the_rank_that_failed_first_is_the_cause(timed_out: bool, tmp_path: Path) -> None:
    def script(launch: Launch) -> Ended:
        out = Path(launch.arguments[-1]).parent
        for age, rank, outcome, reason in ((2, 1, "oom", "out of memory"), (1, 0, "crashed", "connection closed")):
            failure = {"outcome": outcome, "reason": reason, "rank": rank, "exit_status": 3}
            path = out / f"failure.rank{rank}.json"
            write_json(path, failure)
            os.utime(path, (1_000_000 - age, 1_000_000 - age))
        write_json(out / "record.json", {"outcome": "crashed", "reason": "connection closed", "plan": {"rows": 7}})
        return Ended(-15 if timed_out else 1, 1.0, timed_out)

    cell = go(plan(tmp_path, rounds=1), FakeExecutor(script))["cells"]["ddp-custom-weak-2gpu"]
    assert cell["outcomes"] == {"timeout" if timed_out else "oom": 1}
    assert timed_out or cell["reason"] == "rank 1: out of memory"
    record = json.loads((tmp_path / "cells/ddp-custom-weak-2gpu/r1/record.json").read_text())
    assert record["plan"] == {"rows": 7}  # what the worker had found out is kept


def test_time_out_is_an_outcome(tmp_path: Path) -> None:
    executor = FakeExecutor(lambda launch: Ended(-15, 9.0, timed_out=True))
    cell = go(plan(tmp_path, rounds=1), executor)["cells"]["ddp-custom-weak-1gpu"]
    assert cell["outcomes"] == {"timeout": 1}


def test_resume_runs_only_what_is_missing_or_failed(tmp_path: Path) -> None:
    sweep = plan(tmp_path)
    go(sweep, worker())
    (tmp_path / "cells/ddp-custom-weak-1gpu/r2/record.json").unlink()
    broken = tmp_path / "cells/ddp-trainer-weak-1gpu/r1/record.json"
    write_json(broken, {**json.loads(broken.read_text()), "outcome": "crashed", "reason": "x"})
    again = worker()
    go(sweep, again, resume=True)
    assert sorted(Path(launch.arguments[-1]).parent.name for launch in again.launched) == ["r1", "r2"]
    idle = worker()
    summary = go(sweep, idle, resume=True)
    assert idle.launched == []
    assert all(cell["rounds_ok"] == 2 for cell in summary["cells"].values())


def test_resume_refuses_another_plan_and_names_it(tmp_path: Path) -> None:
    go(plan(tmp_path), worker())
    with pytest.raises(ConfigError, match=r"cells\.zero2-custom-weak-1gpu"):
        go(plan(tmp_path, profiles=["ddp", "zero2"]), worker(), resume=True)
    with pytest.raises(ConfigError, match="not empty"):
        go(plan(tmp_path), worker())
    more = worker()
    go(plan(tmp_path, rounds=3), more, resume=True)  # more rounds are the same sweep
    assert len(more.launched) == 4


def test_resume_of_an_empty_folder_starts(tmp_path: Path) -> None:
    executor = worker()
    go(plan(tmp_path / "new"), executor, resume=True)
    assert len(executor.launched) == 8


def test_interruption_keeps_what_is_there(tmp_path: Path) -> None:
    good, sweep = worker(), plan(tmp_path)

    def script(launch: Launch) -> Ended:
        if "ddp-custom-weak-2gpu" in launch.arguments[-1]:
            raise KeyboardInterrupt
        return good.script(launch)

    with pytest.raises(KeyboardInterrupt):
        go(sweep, FakeExecutor(script))
    rest = worker()
    go(sweep, rest, resume=True)
    assert len(rest.launched) == 6


def test_oversubscribed_cells_are_marked_and_left_out(tmp_path: Path) -> None:
    summary = go(plan(tmp_path, gpus=[1, 4]), worker())
    cell = summary["cells"]["ddp-custom-weak-4gpu"]
    assert cell["oversubscribed"]
    assert "speedup" not in cell
    assert any("oversubscribed" in row[-1] for row in table_rows(summary))


def test_reports_are_complete_and_escaped(tmp_path: Path) -> None:
    def script(launch: Launch) -> Ended:
        failure = {"outcome": "crashed", "reason": "<script>alert(1)</script>", "rank": 0, "exit_status": 3}
        write_json(Path(launch.arguments[-1]).parent / "failure.rank0.json", failure)
        return Ended(1, 1.0)

    sweep = plan(tmp_path)
    go(sweep, FakeExecutor(script))
    good = worker()
    (tmp_path / "cells/ddp-custom-weak-1gpu/r1/record.json").unlink()
    open_folder(sweep, resume=True)
    good.script(Launch((str(tmp_path / "cells/ddp-custom-weak-1gpu/r1/run.json"),), {}))
    write_reports(tmp_path, FORMATS)
    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(rows) == 8
    first = next(row for row in rows if row["outcome"] == "ok")
    assert float(first["samples_per_second"]) == pytest.approx(80)
    assert float(first["step_seconds_median"]) == pytest.approx(0.1)
    assert float(first["data_wait_share"]) == pytest.approx(0.1)


def test_launch_lines_are_the_real_ones(tmp_path: Path) -> None:
    lines = [str(line) for line in dry_run_lines(plan(tmp_path, profiles=["zero2"]))]
    assert len(lines) == 4
    assert "--num_processes 2" in lines[2]
    assert "accelerate_configs/zero2.yaml" in lines[2]
    assert "ds_configs/zero2.json" in lines[2]
    assert lines[2].startswith("OMP_NUM_THREADS=1 ")
    assert not (tmp_path / "cells").exists()


def test_two_sweeps_never_share_a_folder(tmp_path: Path) -> None:
    with open_folder(plan(tmp_path), resume=True), pytest.raises(ConfigError, match="another sweep is writing"):
        open_folder(plan(tmp_path), resume=True)
    open_folder(plan(tmp_path), resume=True).close()


def test_damaged_results_are_measured_again(tmp_path: Path) -> None:
    go(plan(tmp_path), worker())
    (tmp_path / "cells/ddp-custom-weak-1gpu/r1/record.json").write_text("{}")
    (tmp_path / "cells/ddp-custom-weak-1gpu/rfoo").mkdir()
    again = worker()
    go(plan(tmp_path), again, resume=True)
    assert len(again.launched) == 1
    (tmp_path / "cells/ddp-custom-weak-1gpu/r1/record.json").write_text('{"outcome": "ok", "reason": ""}')
    assert write_reports(tmp_path)["cells"]["ddp-custom-weak-1gpu"]["rounds_ok"] == 1


@pytest.mark.parametrize(
    "content", [b"\xff[]", b"{}", b"[1]", b'{"plan": 1}', b'{"schema": 99, "plan": {"cells": {}}}']
)
def test_a_damaged_plan_is_refused_and_kept(content: bytes, tmp_path: Path) -> None:
    go(plan(tmp_path), worker())
    (tmp_path / "sweep.json").write_bytes(content)
    with pytest.raises(ConfigError, match="holds no sweep"):
        write_reports(tmp_path)
    with pytest.raises(ConfigError, match="holds no sweep"):
        open_folder(plan(tmp_path), resume=True)
    assert (tmp_path / "sweep.json").read_bytes() == content


@pytest.mark.parametrize("width", [80, 100])
def test_no_figure_is_cut_off(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([0.1, 0.11, 0.12, 0.13] * 4)
    summary = go(plan(tmp_path, gpus=[1, 2, 4], profiles=["ddp"]), worker(lambda config: next(speeds)))
    monkeypatch.setattr(report, "WIDE", width)
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    print_table(summary, "sweep")
    lines = out.getvalue().split("\n- ")[0].splitlines()
    assert max(map(len, lines)) <= width
    words = [word for _, _, rows in tables(summary, "") for row in rows for text in row for word in text.split()]
    assert [word for word in words if word not in out.getvalue()] == []


def test_missing_speed_is_explained_only_where_it_is_shown(tmp_path: Path) -> None:
    steady = go(plan(tmp_path / "a"), worker(lambda c: 0.1 if c["launch"]["world_size"] == 1 else 0.125))
    assert any("missing: communication and everything else 1" in line for line in steady["verdicts"])
    noise = iter([0.1, 0.2, 0.11, 0.4, 0.3, 0.1, 0.2, 0.1])
    noisy = go(plan(tmp_path / "b"), worker(lambda c: next(noise)))
    assert not any("missing" in line for line in noisy["verdicts"])
    single = go(plan(tmp_path / "c", rounds=1), worker())
    assert any(line.startswith("Only one round") for line in single["verdicts"])
