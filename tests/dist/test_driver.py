"""`scaletool train` and `scaletool sweep` with real launches: results, faults, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

TIME_LIMIT_SECONDS = 240
LONG_RUN = 100_000
MARKER = "SCALETOOL_LAUNCH_ID"


def start(*arguments: str, cwd: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scaletool", *arguments]
    variables = {**os.environ, **(environment or {})}
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background shell has it ignored
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=interruptible,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIME_LIMIT_SECONDS)
    return process.returncode, out, err


def workers(folder: Path) -> list[psutil.Process]:
    """Processes of launches below the folder: they name its run.json."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()) and MARKER in process.environ():
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_training(folder: Path, count: int) -> list[psutil.Process]:
    """The `count` training processes of a launch that has begun its steps."""
    deadline = time.monotonic() + TIME_LIMIT_SECONDS / 2
    while time.monotonic() < deadline:
        logs = list(folder.rglob("stderr.log"))
        if any("step      1/" in log.read_text() for log in logs):
            ranks = [process for process in workers(folder) if "accelerate" not in " ".join(process.cmdline()[:3])]
            if len(ranks) == count:
                return ranks
        time.sleep(0.2)
    raise AssertionError("training did not begin: " + "\n".join(log.read_text() for log in folder.rglob("*.log")))


def assert_nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 15
    while workers(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert workers(folder) == []


def test_train_launches_one_run(rows_file: Path, tmp_path: Path) -> None:
    words = ["--profile", "zero2", "--gpus", "2", "--set", f"data.train={rows_file}", "--set", "train.max_steps=3"]
    status, out, err = finish(start("train", *words, "--set", "train.output_dir=run", cwd=tmp_path))
    assert status == 0, err
    assert out.startswith("ok: 3 steps")
    assert "global batch 16" in err
    assert json.loads((tmp_path / "run" / "record.json").read_text())["observed"]["engine"] == "zero2"


@pytest.mark.parametrize(
    ("setting", "variables", "expected", "message"),
    [
        ("data.train=missing.jsonl", {}, 2, "missing.jsonl, which does not exist"),
        ("data.train=empty.jsonl", {}, 2, "no usable rows"),
        ("data.train=one.jsonl", {}, 2, "fewer than 2 processes"),
        (
            "data.train=bad.jsonl,data.streaming=true,data.num_workers=1",
            {},
            2,
            "bad.jsonl:57: no value for column target",
        ),
        ("model.name=no/such/model", {}, 2, "no/such/model"),
        ("train.max_steps=2", {"ACCELERATE_MIXED_PRECISION": "bf16"}, 3, "ACCELERATE_MIXED_PRECISION=bf16"),
        ("train.max_steps=2", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, 3, "STEPS=4"),
    ],
)
def test_exit_status_tells_whose_fault(
    setting: str, variables: dict[str, str], expected: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "one.jsonl").write_text('{"source": "a", "target": "b"}\n')
    rows = ['{"source": "a"}' if number == 56 else '{"source": "a", "target": "b"}' for number in range(64)]
    (tmp_path / "bad.jsonl").write_text("\n".join(rows))
    words = [word for part in setting.split(",") for word in ("--set", part)]
    process = start("train", "--gpus", "2", *words, cwd=tmp_path, environment=variables)
    status, out, err = finish(process)
    assert status == expected, out + err
    assert message in out + err


def test_a_killed_rank_fails_its_cell_only(rows_file: Path, tmp_path: Path) -> None:
    words = [
        "--gpus",
        "2",
        "--modes",
        "custom,trainer",
        "--rounds",
        "1",
        "--set",
        f"data.train={rows_file}",
        "--out",
        "s",
    ]
    process = start("sweep", *words, "--steps", "300", cwd=tmp_path)
    wait_for_training(tmp_path, 2)[1].send_signal(signal.SIGKILL)
    status, out, err = finish(process)
    assert status == 3, err
    summary = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert summary["cells"]["ddp-custom-weak-2gpu"]["outcomes"] == {"crashed": 1}
    assert summary["cells"]["ddp-trainer-weak-2gpu"]["outcomes"] == {"ok": 1}
    assert "1x crashed" in out
    assert_nothing_left(tmp_path)


def test_a_hanging_rank_is_a_time_out(rows_file: Path, tmp_path: Path) -> None:
    settings = [f"data.train={rows_file}", "measure.timeout_seconds=25"]
    words = [part for setting in settings for part in ("--set", setting)]
    process = start(
        "sweep",
        "--gpus",
        "2",
        "--modes",
        "custom",
        "--rounds",
        "1",
        "--steps",
        str(LONG_RUN),
        *words,
        "--out",
        "s",
        cwd=tmp_path,
    )
    wait_for_training(tmp_path, 2)[1].send_signal(signal.SIGSTOP)
    status, _, err = finish(process)
    assert status == 3, err
    summary = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert summary["cells"]["ddp-custom-weak-2gpu"]["outcomes"] == {"timeout": 1}
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_driver_leaves_no_process(number: signal.Signals, rows_file: Path, tmp_path: Path) -> None:
    words = ["--gpus", "2", "--modes", "custom", "--rounds", "1", "--steps", str(LONG_RUN), "--out", "s"]
    process = start("sweep", *words, "--set", f"data.train={rows_file}", cwd=tmp_path)
    wait_for_training(tmp_path, 2)
    process.send_signal(number)
    status, _, err = finish(process)
    assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    if number != signal.SIGKILL:
        assert "--resume" in err
    assert_nothing_left(tmp_path)
