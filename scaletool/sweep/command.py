"""From a cell to its run.json, launch line and environment: the only file of the driver that reads variables."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scaletool.config import RunConfig
from scaletool.sweep.matrix import Cell

MARKER = "SCALETOOL_LAUNCH_ID"
"""Variable that every process of a launch inherits: how leftovers are found, whatever session they moved to."""

WATCHED = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
"""Variables that accelerate lets win over arguments; the launcher hides some of them from the worker."""


@dataclass(frozen=True)
class Machine:
    """What the driver knows of this machine without torch."""

    gpu_names: tuple[str, ...]
    cpu_count: int

    @property
    def slots(self) -> int:
        """Processes that can run without sharing: GPUs, or cores where there are none."""
        return len(self.gpu_names) or self.cpu_count


@dataclass(frozen=True)
class Launch:
    """A launch line and the variables it adds to the environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items() if name != MARKER]
        return " ".join([*variables, shlex.join(self.arguments)])


def environment() -> dict[str, str]:
    """The variables around the driver, for those who may not read them themselves."""
    return dict(os.environ)


def probe_machine() -> Machine:
    """GPUs as the worker would see them, and usable cores."""
    names: list[str] = []
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        names = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Machine(tuple(names if visible is None else _visible(names, visible)), len(os.sched_getaffinity(0)))


def _visible(names: list[str], devices: str) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves. Like CUDA it ends at the first entry that names none."""
    found: list[str] = []
    for device in map(str.strip, devices.split(",")):
        if device.isdecimal():
            matching = names[int(device) : int(device) + 1]
        elif device.startswith("MIG-"):  # a part of a GPU, which the list of GPUs does not name
            matching = [device]
        else:  # a UUID or the beginning of one
            matching = [name for name in names if device and f"UUID: {device}" in name]
        if not matching:
            break
        found += matching[:1]
    return found


def cell_config(cell: Cell, config: RunConfig, out: Path, *, measured: bool) -> RunConfig:
    """The resolved run config of one launch, as it goes into run.json."""
    steps = config.measure.warmup_steps + config.measure.steps if measured else config.train.max_steps
    return config.replace(
        train__mode=cell.mode,
        train__max_steps=steps,
        train__output_dir=str(out.resolve()),
        data__per_device_batch_size=cell.per_device_batch_size,
        launch__profile=cell.profile.name,
        launch__engine=cell.profile.engine,
        launch__world_size=cell.gpus,
        launch__scaling=cell.scaling if measured else None,
        launch__measured=measured,
        launch__environment={name: os.environ[name] for name in WATCHED if name in os.environ},
    )


def launch_line(cell: Cell, config: RunConfig, run_json: Path, machine: Machine, *, launch_id: str = "") -> Launch:
    """`accelerate launch` with the cell's profile, on one node."""
    beside = Path(sys.executable).with_name("accelerate")
    launcher = [str(beside), "launch"] if beside.is_file() else [sys.executable, "-m", "accelerate.commands.launch"]
    flags = cell.profile.launch_flags(cell.gpus, config.train.precision)
    port = ["--main_process_port", str(free_port())]
    environment = {MARKER: launch_id}
    if not machine.gpu_names:
        # torchrun would set it for several processes only; every count must compute with the same threads each.
        environment["OMP_NUM_THREADS"] = "1"
    return Launch((*launcher, *flags, *port, "-m", "scaletool.train", str(run_json)), environment)


def full_environment(launch: Launch) -> dict[str, str]:
    return {**os.environ, **launch.environment}


def free_port() -> int:
    """A port that was free a moment ago, below the range that outgoing connections take theirs from."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
