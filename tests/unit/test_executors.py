"""Real child processes in place of a launcher: how they ended is told right, and nothing outlives a launch."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaletool.sweep import executors
from scaletool.sweep.command import MARKER, Launch

# Like torch's launcher it puts its worker into a session of its own; this worker does not care for SIGTERM, either.
STUBBORN_WORKER = """
import os, signal, time
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = f"""
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", {STUBBORN_WORKER!r}], stdout=subprocess.PIPE)
worker.stdout.readline()
time.sleep(SECONDS)
"""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "GRACE_SECONDS", 0.3)


def run(code: str, log: Path, timeout_seconds: float = 20.0, *, echo: bool = False) -> executors.Ended:
    launch = Launch((sys.executable, "-c", code), {MARKER: str(log)})
    return executors.LocalExecutor().run(launch, log, timeout_seconds, echo=echo)


def test_output_and_exit_status_are_kept(tmp_path: Path) -> None:
    ended = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)", tmp_path / "log")
    assert (ended.returncode, ended.timed_out) == (7, False)
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_echo_goes_to_stderr_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("print('step 1')", tmp_path / "log", echo=True).returncode == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("", "step 1\n")
    assert (tmp_path / "log").read_text() == "step 1\n"


def test_a_time_out_ends_the_launcher_and_tells_by_which_signal(tmp_path: Path) -> None:
    ended = run("import time; time.sleep(60)", tmp_path / "log", 0.2)
    assert (ended.returncode, ended.timed_out) == (-15, True)


def test_a_time_out_asks_where_everything_stands(tmp_path: Path) -> None:
    """Only of processes that know the signal: it would end the others before their time."""
    child = (
        "import faulthandler, time\n"
        "from scaletool.record import STACKS_SIGNAL\n"
        "faulthandler.register(STACKS_SIGNAL)\n"
        "def stuck_here(): time.sleep(60)\n"
        "stuck_here()"
    )
    launcher = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    ended = run(launcher, tmp_path / "log", timeout_seconds=2.0)
    assert ended.timed_out
    assert "in stuck_here" in (tmp_path / "log").read_text()


def test_workers_in_other_sessions_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    assert run(LAUNCHER.replace("SECONDS", "0"), tmp_path / "log").returncode == 0
    assert executors.marked_processes(str(tmp_path / "log")) == []


def test_an_impatient_second_interrupt_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(executors, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        run(LAUNCHER.replace("SECONDS", "60"), tmp_path / "log", 1.5)
    deadline = time.monotonic() + 5
    while executors.marked_processes(str(tmp_path / "log")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert executors.marked_processes(str(tmp_path / "log")) == []
