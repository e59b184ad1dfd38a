"""record.json: what a run was asked for, what it observed, how it ended. All that a worker says to the driver."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

SCHEMA = 1
OUTCOMES = ("ok", "oom", "timeout", "diverged", "crashed", "invalid")
CPU_STAMP = "cpu-gloo: not a GPU performance claim"
RECORD_FILE = "record.json"
FAILURE_FILE = "failure.rank{rank}.json"
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a training process print where each of its threads stands: what a hanging run is asked before its end."""


def default_folder(what: str, started: float) -> Path:
    """runs/<UTC time>-<what>, by the start time in seconds since the epoch."""
    return Path("runs") / f"{datetime.fromtimestamp(started, timezone.utc):%Y%m%d-%H%M%S}-{what}"


def write_json(path: Path, content: Any) -> None:
    """Write atomically: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # Unescaped: run.json is read as YAML, which does not join escaped surrogates. Half a pair is written escaped.
    text = json.dumps(content, indent=1, ensure_ascii=False)
    scratch.write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
    os.replace(scratch, path)


def shown(value: float | None, form: str) -> str:
    """A figure of a record as text; "n/a" where it has none (the loss of a step that overflowed)."""
    return "n/a" if value is None else format(value, form)


def read_json(path: Path) -> Any | None:
    """Content of a JSON file, or None where it is missing or not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a run's folder, or None where there is no whole one."""
    record = read_json(folder / RECORD_FILE)
    if not isinstance(record, dict) or record.get("outcome") not in OUTCOMES:
        return None
    needed = ("reason", *(("steps", "window", "ranks", "memory") if record["outcome"] == "ok" else ()))
    return record if all(key in record for key in needed) else None


def exit_status(record: Mapping[str, Any]) -> int:
    """The process exit status that stands for a record: 0 for ok, else whose fault it was."""
    return 0 if record["outcome"] == "ok" else int(record.get("exit_status") or 3)


def closing_line(record: Mapping[str, Any]) -> str:
    """How a run ended, in one line."""
    if record["outcome"] != "ok":
        return f"{record['outcome']}: {record['reason']}"
    steps, window = record["steps"], record["window"]
    seconds = window["seconds"] or float("nan")
    first, last = (shown(step["loss"], ".4f") for step in (steps[0], steps[-1]))
    skipped = sum(bool(step["skipped"]) for step in steps)
    rows = record.get("data", {}).get("skipped_rows")
    return (
        f"ok: {len(steps)} steps, {skipped} skipped, loss {first} -> {last},"
        f" {window['samples'] / seconds:.1f} samples/s, {window['real_tokens'] / seconds:.0f} real tokens/s"
        + (f", {rows} bad rows left out" if rows else "")
    )


def failed_record(outcome: str, reason: str, *, log_tail: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    """The record of a run that left none of its own; `fields` may add requested, observed and so on."""
    assert outcome in OUTCOMES
    return {
        "schema": SCHEMA,
        "requested": {},
        "observed": {},
        "steps": [],
        **fields,
        "outcome": outcome,
        "reason": reason,
        "log_tail": log_tail or [],
    }
