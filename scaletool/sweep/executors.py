"""Start one launch, see it to its end, leave nothing behind. `LocalExecutor` is real, `FakeExecutor` for tests."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import psutil

from scaletool.record import STACKS_SIGNAL
from scaletool.sweep.command import MARKER, Launch, full_environment

GRACE_SECONDS = 10.0
STACKS_SECONDS = 1.0  # enough for a rank to print where it stands
LAUNCHER_REPORT = re.compile(rb"[EW]\d{4} .*torch/distributed/elastic/")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Ended:
    """How a launch ended. returncode is the launcher's; seconds from start to the last process gone."""

    returncode: int
    seconds: float
    timed_out: bool = False


class Executor(Protocol):
    def run(self, launch: Launch, log: Path, timeout_seconds: float | None = None, *, echo: bool = False) -> Ended: ...


class LocalExecutor:
    """A child process on this machine. torch's launcher puts its workers into sessions of their own, so a process
    group does not hold them: whatever still carries the launch's marker afterwards is ended by pid."""

    def run(self, launch: Launch, log: Path, timeout_seconds: float | None = None, *, echo: bool = False) -> Ended:
        """Blocks until the launch is over. With `echo` the output also goes to stderr. Anything raised meanwhile
        (KeyboardInterrupt above all) ends the launch first. After a time-out the log tells where every rank stood."""
        started = time.monotonic()
        timed_out = False
        copier: threading.Thread | None = None
        with log.open("wb") as stream:
            try:
                process = subprocess.Popen(
                    launch.arguments,
                    env=full_environment(launch),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if echo else stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
                copier = _copy(process.stdout, stream) if echo and process.stdout else None
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                timed_out = True
                _ask_for_stacks(launch)
            finally:
                _end(launch.environment[MARKER])
                if copier:
                    copier.join(GRACE_SECONDS)
        return Ended(process.wait(), time.monotonic() - started, timed_out)


class FakeExecutor:
    """For unit tests: calls `script(launch)`, which writes what a worker would, instead of starting anything."""

    def __init__(self, script: Callable[[Launch], Ended]) -> None:
        self.script = script
        self.launched: list[Launch] = []

    def run(self, launch: Launch, log: Path, timeout_seconds: float | None = None, *, echo: bool = False) -> Ended:
        self.launched.append(launch)
        log.touch()
        return self.script(launch)


def _die_with_parent() -> None:
    """In the child: SIGTERM when the driver dies, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _copy(source: IO[bytes], log: IO[bytes]) -> threading.Thread:
    def copy() -> None:
        shown = True
        for line in source:
            log.write(line)
            log.flush()
            # The launcher's own stack, which says nothing about the run, stays in the log.
            shown = shown and not LAUNCHER_REPORT.match(line)
            if shown:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _ask_for_stacks(launch: Launch) -> None:
    """Training processes, and only they, catch this signal: they print the stacks of all their threads to the log."""
    for process in marked_processes(launch.environment[MARKER]):
        try:
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
            if caught and int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1:
                process.send_signal(STACKS_SIGNAL)
        except (OSError, psutil.Error):
            pass  # gone meanwhile
    time.sleep(STACKS_SECONDS)


def _end(launch_id: str) -> None:
    """End the launcher and everything of its launch: SIGTERM, then SIGKILL after a grace time, or at once when the
    user grows impatient. Only looks (psutil's own wait would take the launcher's exit status away from Popen)."""
    try:
        _signal_all(launch_id, signal.SIGTERM)
    finally:
        # Gone, not only signalled: the next launch needs their GPU memory and their cores.
        _signal_all(launch_id, signal.SIGKILL)


def marked_processes(launch_id: str) -> list[psutil.Process]:
    """Living processes of this user that inherited the launch's marker."""
    if not launch_id:
        return []
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARKER) == launch_id:
                found.append(process)
        except psutil.Error:
            continue  # gone meanwhile, or another user's
    return found


def _signal_all(launch_id: str, number: int) -> None:
    """Signal the processes of a launch, and wait up to the grace time until none is left."""
    for process in marked_processes(launch_id):
        try:
            process.send_signal(number)
        except psutil.Error:
            pass  # gone meanwhile
    deadline = time.monotonic() + GRACE_SECONDS
    while marked_processes(launch_id) and time.monotonic() < deadline:
        time.sleep(0.05)
