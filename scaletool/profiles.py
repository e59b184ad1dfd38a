"""Profiles: the shipped accelerate YAML and DeepSpeed JSON files, and the only place that knows their key names.

A profile is a file. Adding a strategy means adding a YAML (and a JSON); what it stands for, its
engine, is read from its contents.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from scaletool.config import RunConfig
from scaletool.errors import ConfigError

ENGINES = ("single", "ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp", "fsdp_grad_op", "hsdp")
"""Names of what really runs. `single` is one process without any wrapper."""

FSDP1 = "FSDP1 is not supported: its sharded checkpoints lose Adam's state"

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def shipped(folder: str) -> Path:
    """`accelerate_configs`, `ds_configs` or `launch`: inside an installed package, else in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "shipped" / folder
    return installed if installed.is_dir() else package.parent / folder


@dataclass(frozen=True)
class Profile:
    """One accelerate config file."""

    name: str
    path: Path

    @cached_property
    def content(self) -> dict[str, Any]:
        """The YAML as a dict. Raises ConfigError where it is not a mapping."""
        try:
            content = yaml.safe_load(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"profile {self.name} cannot be read: {error}", where=str(self.path)) from None
        if not isinstance(content, dict) or "distributed_type" not in content:
            raise ConfigError("not an accelerate config: no distributed_type", where=str(self.path))
        return content

    @cached_property
    def deepspeed_path(self) -> Path | None:
        """The DeepSpeed JSON: as written, beside the YAML's folder, or as accelerate would find it from here."""
        named = (self.content.get("deepspeed_config") or {}).get("deepspeed_config_file")
        if named is None:
            return None
        candidates: list[Path] = [Path(named), self.path.parent.parent / named, self.path.parent / named]
        for candidate in candidates:
            if candidate.is_file():
                return candidate.resolve()
        raise ConfigError(
            f"profile {self.name}: deepspeed_config_file {named} does not exist",
            where=f"{self.path} (deepspeed_config.deepspeed_config_file)",
            hint="looked for " + ", ".join(str(candidate) for candidate in candidates),
        )

    @cached_property
    def engine(self) -> str:
        """One of ENGINES, by the file's contents."""
        kind = str(self.content["distributed_type"])
        if kind == "DEEPSPEED":
            if self.deepspeed_path is None:
                raise ConfigError(
                    f"profile {self.name} has no deepspeed_config_file", where=str(self.path), hint="name a JSON file"
                )
            return _deepspeed_engine(read_deepspeed(self.deepspeed_path))
        if kind == "FSDP":
            parallelism, fsdp = self.content.get("parallelism_config") or {}, self.content.get("fsdp_config") or {}
            if fsdp.get("fsdp_version") != 2:
                raise ConfigError(FSDP1, where=f"{self.path} (fsdp_config.fsdp_version)", hint="set fsdp_version: 2")
            reshard = fsdp.get("fsdp_reshard_after_forward", True)
            return _fsdp_engine(reshard, parallelism.get("parallelism_config_dp_replicate_size", 1))
        if kind == "MULTI_GPU":
            return "ddp"
        raise ConfigError(
            f"profile {self.name}: distributed_type {kind} is not supported",
            where=str(self.path),
            hint="use MULTI_GPU, DEEPSPEED or FSDP",
        )

    def launch_flags(self, world_size: int, precision: str) -> list[str]:
        """Flags of `accelerate launch` that make this profile run on one node with `world_size` processes."""
        flags = ["--config_file", str(self.path), "--num_processes", str(world_size)]
        flags += ["--num_machines", "1", "--machine_rank", "0"]
        if self.deepspeed_path is not None:
            flags += ["--deepspeed_config_file", str(self.deepspeed_path)]
        elif precision != self.content.get("mixed_precision"):
            flags += ["--mixed_precision", "no" if precision == "fp32" else precision]
        if self.engine == "hsdp":
            flags += ["--parallelism_config_dp_replicate_size", "2"]
            flags += ["--parallelism_config_dp_shard_size", str(world_size // 2)]
        return flags


def profile_names() -> list[str]:
    return sorted(path.stem for path in shipped("accelerate_configs").glob("*.yaml"))


def find_profile(name: str) -> Profile:
    """A shipped profile by name, or any accelerate YAML by path. Raises ConfigError with the known names."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else shipped("accelerate_configs") / f"{name}.yaml"
    if not path.is_file():
        known = profile_names()
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "known: " + ", ".join(known)
        raise ConfigError(f"unknown profile {name}", hint=hint)
    profile = Profile(path.stem, path.resolve())
    try:  # a profile that cannot be understood is refused here, not after the launch
        engine = profile.engine
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"profile {profile.name} is malformed: {error}", where=str(profile.path)) from None
    if engine not in ENGINES:
        raise ConfigError(
            f"engine {engine} is not supported", where=str(profile.path), hint="known: " + ", ".join(ENGINES)
        )
    return profile


def requested_engine(environment: Mapping[str, str]) -> str:
    """The engine that the variables exported by `accelerate launch` (or torchrun, or nothing) ask for."""
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        named = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        if not named:
            raise ConfigError(
                "ACCELERATE_USE_DEEPSPEED is set, but no DeepSpeed file is named",
                where="environment",
                hint="launch with accelerate launch --config_file, or unset it",
            )
        return _deepspeed_engine(read_deepspeed(Path(named)))
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        if environment.get("FSDP_VERSION") != "2":
            raise ConfigError(
                FSDP1, where="environment (FSDP_VERSION)", hint="set fsdp_config.fsdp_version: 2 in the accelerate YAML"
            )
        replicas = int(environment.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        return _fsdp_engine(environment.get("FSDP_RESHARD_AFTER_FORWARD", "true") == "true", replicas)
    return "ddp" if "LOCAL_RANK" in environment else "single"


def read_deepspeed(path: Path) -> dict[str, Any]:
    """A DeepSpeed JSON file. Raises ConfigError where it is missing or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"DeepSpeed config cannot be read: {error}", where=str(path), hint="name a JSON file in the accelerate YAML"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError("a DeepSpeed config must be a JSON object", where=str(path))
    return content


def bind_deepspeed(path: Path, config: RunConfig, world_size: int, *, half: bool = True) -> dict[str, Any]:
    """The JSON with everything that the run config owns filled in, the same for both modes.

    `max_grad_norm` null becomes 0.0: DeepSpeed reads a missing gradient_clipping as 1.0. `half` False switches fp16
    off, for a machine without GPUs. Raises ConfigError where the file pins another value.
    """
    content = read_deepspeed(path)
    batch, accumulation = config.data.per_device_batch_size, config.train.gradient_accumulation_steps
    values = (batch * accumulation * world_size, batch, accumulation, config.train.max_grad_norm or 0.0)
    owned = dict(zip(BATCH_KEYS, values, strict=True))
    for key, value in owned.items():
        pinned = content.get(key, "auto")
        if pinned not in ("auto", value):
            raise ConfigError(
                f"{key} is {pinned} in the DeepSpeed config, {value} by the run config",
                where=f"{path} ({key})",
                hint=f'set "{key}": "auto", the run config owns it',
            )
    wanted = config.train.precision if half or config.train.precision == "bf16" else "fp32"
    precisions = {name: {**content.get(name, {}), "enabled": name == wanted} for name in ("fp16", "bf16")}
    return {**content, **owned, **precisions}


def observed_deepspeed(engine: Any) -> dict[str, Any]:
    """What a built DeepSpeedEngine says of itself, in the words of record.json."""
    offload = engine.zero_offload_optimizer()
    device = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
    return {
        "engine": f"zero{engine.zero_optimization_stage()}" + ("_offload" if device != "none" else ""),
        "precision": "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
        "per_device_batch_size": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "max_grad_norm": engine.gradient_clipping() or None,
    }


def _deepspeed_engine(content: Mapping[str, Any]) -> str:
    zero = content.get("zero_optimization", {})
    offload = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    return f"zero{zero.get('stage', 0)}" + ("_offload" if offload else "")


def _fsdp_engine(reshard_after_forward: bool, replicas: int) -> str:
    if replicas > 1:
        return "hsdp"
    return "fsdp" if reshard_after_forward else "fsdp_grad_op"
