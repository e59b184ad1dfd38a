"""Start the real launcher in a subprocess with a hard time limit, and show the log's end when it fails."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletool.sweep.command import MARKER, Launch
from scaletool.sweep.executors import LocalExecutor

REPOSITORY = Path(__file__).resolve().parents[2]
TIME_LIMIT_SECONDS = 240
TAIL_LINES = 150  # holds the stacks of the ranks that a time-out asked for


@dataclass(frozen=True)
class Finished:
    """A launch that ended: exit status, both streams joined, and the record it left."""

    status: int
    output: str
    record: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.record["steps"]]

    @property
    def grad_norms(self) -> list[float]:
        return [step["grad_norm"] for step in self.record["steps"]]


def accelerate_launch(
    profile: str, processes: int, *arguments: str, flags: Sequence[str] = (), **options: Any
) -> Finished:
    """`accelerate launch --config_file accelerate_configs/<profile>.yaml --num_processes N -m scaletool.train ...`"""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{profile}.yaml"]
    launcher += ["--num_processes", str(processes), "--num_machines", "1", "--main_process_port", str(free_port())]
    return run([sys.executable, *launcher, *flags, "-m", "scaletool.train", *arguments], **options)


def torchrun(processes: int, *arguments: str, **options: Any) -> Finished:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    return run([*launcher, "--master_port", str(free_port()), "-m", "scaletool.train", *arguments], **options)


def python(*arguments: str, **options: Any) -> Finished:
    return run([sys.executable, "-m", "scaletool.train", *arguments], **options)


def run(command: list[str], *, out: Path, environment: dict[str, str] | None = None, ok: bool = True) -> Finished:
    shutil.rmtree(out, ignore_errors=True)
    command = [*command, "--set", f"train.output_dir={out}"]
    variables = {"OMP_NUM_THREADS": "1", **(environment or {}), MARKER: uuid.uuid4().hex}
    log = out.with_name(f"{out.name}.log")
    launch = Launch(("env", "-C", str(REPOSITORY), *command), variables)
    ended = LocalExecutor().run(launch, log, TIME_LIMIT_SECONDS)
    output = log.read_text()
    record_path = out / "record.json"
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    if ended.timed_out or (ok and (ended.returncode != 0 or record.get("outcome") != "ok")):
        tail = "\n".join(output.splitlines()[-TAIL_LINES:])
        word = "no end in time" if ended.timed_out else f"status {ended.returncode}"
        raise AssertionError(f"{word}, {record.get('outcome')}: {' '.join(command)}\n{tail}")
    return Finished(ended.returncode, output, record)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def samples(out: Path) -> dict[int, list[int]]:
    """step -> sorted source rows of its global batch, over all ranks."""
    steps: dict[int, list[int]] = {}
    for path in out.glob("samples.rank*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], []).extend(entry["rows"])
    return {step: sorted(rows) for step, rows in sorted(steps.items())}
