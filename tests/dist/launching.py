"""Start the real launcher in a subprocess with a hard time limit, and show the log's end when it fails."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TIME_LIMIT_SECONDS = 240
TAIL_LINES = 50


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


def accelerate_launch(profile: str, processes: int, *arguments: str, flags: Sequence[str] = (), **options: Any) -> Finished:
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
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_SECONDS,
        check=False,
    )
    record_path = out / "record.json"
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    if ok and (done.returncode != 0 or record.get("outcome") != "ok"):
        tail = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
        raise AssertionError(f"status {done.returncode}, {record.get('outcome')}: {' '.join(command)}\n{tail}")
    return Finished(done.returncode, done.stdout, record)


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
