"""The process's place in the launch: the only file of the worker that touches environment variables."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.profiles import bind_deepspeed, requested_engine

DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
PRECISION = "ACCELERATE_MIXED_PRECISION"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
PRECISION_NAMES = {"no": "fp32"}


@dataclass(frozen=True)
class World:
    """What the launcher said. `contradictions` are its variables that disagree with the run config."""

    rank: int
    local_rank: int
    world_size: int
    engine: str
    contradictions: tuple[str, ...]

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_world(config: RunConfig) -> World:
    """Read the launcher's variables. Raises ConfigError for an engine that is not supported."""
    return World(
        rank=own_rank(),
        local_rank=_number("LOCAL_RANK", 0),
        world_size=world_size(),
        engine=requested_engine(os.environ),
        contradictions=tuple(_contradictions(config)),
    )


def own_rank() -> int:
    """This process's rank; 0 without a launcher."""
    return _number("RANK", 0)


def world_size() -> int:
    """Number of processes by the launcher's word; 1 without one."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, expected a number", where="environment", hint=f"unset {name}")
    return int(text)


def _contradictions(config: RunConfig) -> list[str]:
    """accelerate lets these variables win over arguments without a word; a run under them is not the one asked for."""
    found = []
    for name, asked in (
        (PRECISION, config.train.precision),
        (ACCUMULATION, str(config.train.gradient_accumulation_steps)),
    ):
        for origin, value in (
            ("environment", os.environ.get(name)),
            ("the driver's environment", config.launch.environment.get(name)),
        ):
            if value is None or PRECISION_NAMES.get(value, value) == asked:
                continue
            if name == PRECISION and value == "no" and "ACCELERATE_USE_DEEPSPEED" in os.environ:
                continue  # the launcher's default beside a DeepSpeed file, which holds the precision itself
            found.append(f"{name}={value} in {origin}, the run config says {asked}")
    return found


def cache_folder(config: RunConfig) -> Path:
    """data.cache_dir, else `scaletool` in the user's cache folder."""
    if config.data.cache_dir is not None:
        return Path(config.data.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaletool"


def bind_engine(config: RunConfig, world: World, *, has_gpu: bool) -> None:
    """Make accelerate and Trainer find the run config's own numbers, the same for both modes.

    DeepSpeed: the JSON with batch, accumulation, clipping and precision filled in takes the file's place
    (both libraries accept it base64-encoded). Others: the precision, where no launcher exported one.
    """
    if DEEPSPEED_FILE in os.environ:
        bound = bind_deepspeed(Path(os.environ[DEEPSPEED_FILE]), config, world.world_size, half=has_gpu)
        os.environ[DEEPSPEED_FILE] = base64.urlsafe_b64encode(json.dumps(bound).encode()).decode()
    elif PRECISION not in os.environ:
        os.environ[PRECISION] = "no" if config.train.precision == "fp32" else config.train.precision
    if not has_gpu and os.environ.get(PRECISION) == "fp16":
        os.environ[PRECISION] = "no"


def pin_to_cpu() -> None:
    """Variables of the CPU path: accelerate's device, and gloo on loopback where all processes are on this machine."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
