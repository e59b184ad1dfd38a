"""The schedule: launch every cell in every round, keep each result as it comes, go on after failures, resume."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from scaletool import __version__
from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.record import CPU_STAMP, RECORD_FILE, SCHEMA, failed_record, read_json, read_record, write_json
from scaletool.sweep.command import Launch, Machine, cell_config, launch_line
from scaletool.sweep.executors import Ended, Executor
from scaletool.sweep.matrix import Cell, round_order

SWEEP_FILE = "sweep.json"
LOG_FILE = "stderr.log"
LOCK_FILE = ".lock"
LOG_TAIL_LINES = 100
ERROR_LINE = re.compile(r"(error:|[\w.]*(Error|Exception)\b)(?!.*ChildFailedError)")
"""A line that names what went wrong; the first one counts, torch's launcher adds its own below."""


@dataclass(frozen=True)
class Sweep:
    """A planned sweep: what runs, how often, where its files go."""

    cells: tuple[Cell, ...]
    config: RunConfig
    out: Path
    machine: Machine

    @property
    def rounds(self) -> int:
        return self.config.measure.rounds

    def folder(self, cell: Cell, round_number: int) -> Path:
        return self.out / "cells" / cell.name / f"r{round_number}"

    def schedule(self) -> Iterator[tuple[int, Cell]]:
        for number in range(1, self.rounds + 1):
            yield from ((number, cell) for cell in round_order(self.cells, number))

    def is_oversubscribed(self, cell: Cell) -> bool:
        return cell.gpus > self.machine.slots

    def plan(self) -> dict[str, Any]:
        """Everything that makes results comparable; --resume refuses another plan."""
        config = self.config.to_dict()
        del config["launch"], config["train"]["output_dir"]
        cells = {cell.name: {**cell.facts(), "oversubscribed": self.is_oversubscribed(cell)} for cell in self.cells}
        return {"cells": cells, "config": config}


def open_folder(sweep: Sweep, *, resume: bool) -> IO[bytes]:
    """Write sweep.json and return the folder's lock, held until it is closed. Raises ConfigError for a used folder
    without --resume, another plan with it, or a folder that another sweep is writing to."""
    path = sweep.out / SWEEP_FILE
    if sweep.out.exists() and not sweep.out.is_dir():
        raise ConfigError(f"{sweep.out} is a file", where="--out")
    if not resume and sweep.out.is_dir() and any(sweep.out.iterdir()):
        raise ConfigError(
            f"{sweep.out} is not empty", where="--out", hint="give --resume to finish it, or another --out"
        )
    sweep.out.mkdir(parents=True, exist_ok=True)
    lock = (sweep.out / LOCK_FILE).open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(
            f"another sweep is writing to {sweep.out}", where="--out", hint="wait for it to end"
        ) from None
    earlier = read_sweep(sweep.out)
    plan = json.loads(json.dumps(sweep.plan()))
    if earlier is not None:
        differing = sorted(_differences(earlier["plan"], plan))
        grown = earlier["plan"]["config"]["measure"]["rounds"] <= sweep.rounds
        differing = [key for key in differing if not (key == "config.measure.rounds" and grown)]
        if differing:
            raise ConfigError(
                f"{sweep.out} holds another sweep; differing: {', '.join(differing)}",
                where="--resume",
                hint="repeat the first command line, or give another --out (more --rounds is fine)",
            )
    started = (earlier or {}).get("started") or datetime.now(timezone.utc).isoformat(timespec="seconds")
    machine = {"gpus": list(sweep.machine.gpu_names), "cpu_count": sweep.machine.cpu_count}
    content = {"schema": SCHEMA, "scaletool": __version__, "started": started, "machine": machine, "plan": plan}
    order = [f"{cell.name}/r{number}" for number, cell in sweep.schedule()]
    write_json(path, {**content, "order": order})
    return lock


def read_sweep(out: Path) -> dict[str, Any] | None:
    """sweep.json of a folder, None where there is none. Raises ConfigError where it is damaged or of another schema."""
    content: Any = read_json(out / SWEEP_FILE)
    try:
        plan = content["plan"] if content else {}
        whole = (
            bool(plan) and content["schema"] == SCHEMA and plan["cells"] and plan["config"]["measure"]["rounds"] >= 1
        )
    except (KeyError, TypeError):
        whole = False
    if whole:
        return dict(content)
    if (out / SWEEP_FILE).exists():
        raise ConfigError(
            f"{out} holds no sweep that can be read: its {SWEEP_FILE} is damaged, or of another version",
            hint="sweep again into another --out",
        )
    return None


def run_sweep(
    sweep: Sweep,
    executor: Executor,
    *,
    after_cell: Callable[[Cell, int, dict[str, Any]], None],
    before_cell: Callable[[Cell, int], None],
) -> None:
    """Launch what has no `ok` record yet. A failed cell never stops the others."""
    for number, cell in sweep.schedule():
        folder = sweep.folder(cell, number)
        earlier = read_record(folder)
        if earlier is None or earlier["outcome"] != "ok":
            before_cell(cell, number)
            record = launch(cell, sweep.config, folder, sweep.machine, executor, measured=True)
        else:
            record = earlier
        after_cell(cell, number, record)


def launch(
    cell: Cell, config: RunConfig, folder: Path, machine: Machine, executor: Executor, *, measured: bool
) -> dict[str, Any]:
    """One launch in a folder of its own; returns its record, made up from what is left when the worker left none."""
    if measured:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in [folder / RECORD_FILE, *folder.glob("failure.rank*.json")]:
        stale.unlink(missing_ok=True)
    run_json = folder.resolve() / "run.json"
    write_json(run_json, cell_config(cell, config, folder, measured=measured).to_dict())
    line = launch_line(cell, config, run_json, machine, launch_id=uuid.uuid4().hex)
    (folder / "launch.txt").write_text(f"{line}\n", encoding="utf-8")
    limit = config.measure.timeout_seconds if measured else None
    ended = executor.run(line, folder / LOG_FILE, limit, echo=not measured)
    record = read_record(folder)
    if record is None or record["outcome"] != "ok":
        record = explain_failure(folder, ended, record, config.measure.timeout_seconds)
        if not machine.gpu_names:
            record["stamp"] = CPU_STAMP
        write_json(folder / RECORD_FILE, record)
    return record


def explain_failure(
    folder: Path, ended: Ended, record: dict[str, Any] | None, timeout_seconds: float
) -> dict[str, Any]:
    """The record of a failed launch: the time-out (what ranks say while they are stopped is no cause), else the word of
    the rank that failed first (the others only see their peer gone), else the log's."""
    lines = _last_lines(folder / LOG_FILE)
    kept = {key: value for key, value in (record or {}).items() if key not in ("outcome", "reason")}
    fields = {"exit_status": 3, **kept, "returncode": ended.returncode, "log_tail": lines[-LOG_TAIL_LINES:]}
    if ended.timed_out:
        reason = f"no end after {timeout_seconds:g} s; all its processes were stopped, their stacks are in {LOG_FILE}"
        return failed_record("timeout", reason, **{**fields, "exit_status": 3})
    written = sorted(folder.glob("failure.rank*.json"), key=lambda path: path.stat().st_mtime_ns)
    first = next(filter(None, map(read_json, written)), None)
    if record is not None and (first is None or first["reason"] == record["reason"]):
        return failed_record(record["outcome"], record["reason"], **fields)
    if first is not None:
        fields["exit_status"] = first.get("exit_status", 3)
        return failed_record(first["outcome"], f"rank {first['rank']}: {first['reason']}", **fields)
    outcome = "oom" if any("out of memory" in text.lower() for text in lines) else "crashed"
    signal_text = f"killed by signal {-ended.returncode}" if ended.returncode < 0 else f"exit status {ended.returncode}"
    error = next((text for text in lines if ERROR_LINE.match(text)), "no error line in its log")
    return failed_record(outcome, f"launcher {signal_text}, no record left; {error[:200]}", **fields)


def dry_run_lines(sweep: Sweep) -> list[Launch]:
    """The launch line of every cell, once (rounds repeat them with another port)."""
    return [
        launch_line(cell, sweep.config, sweep.folder(cell, 1).resolve() / "run.json", sweep.machine)
        for cell in sweep.cells
    ]


def _last_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 64_000))
        return stream.read().decode("utf-8", "replace").splitlines()


def _differences(one: Any, other: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _differences(one.get(key), other.get(key), f"{prefix}.{key}" if prefix else key)
    elif one != other:
        yield prefix
