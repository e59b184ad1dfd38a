"""What really runs, read from the built objects, and held against what was asked for."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from scaletool.config import RunConfig
from scaletool.errors import RunError
from scaletool.profiles import observed_deepspeed
from scaletool.train.meter import all_gather
from scaletool.train.world import World

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "numpy")


def requested(config: RunConfig, world: World, *, has_gpu: bool) -> dict[str, Any]:
    """What this launch should be, on this machine: fp16 becomes fp32 where there is no GPU."""
    launch = config.launch
    world_size = launch.world_size or world.world_size
    engine = launch.engine or world.engine
    return {
        "world_size": world_size,
        "engine": engine,
        "distributed_type": _distributed_type(engine, has_gpu),
        "precision": config.train.precision if has_gpu or config.train.precision != "fp16" else "fp32",
        "per_device_batch_size": config.data.per_device_batch_size,
        "gradient_accumulation_steps": config.train.gradient_accumulation_steps,
        "global_batch_size": world_size * config.data.per_device_batch_size * config.train.gradient_accumulation_steps,
        "max_grad_norm": config.train.max_grad_norm,
        "mode": config.train.mode,
    }


def observed(
    accelerator: Any,
    model: Any,
    *,
    mode: str,
    per_device_batch_size: int,
    accumulation: int,
    max_grad_norm: float | None,
) -> dict[str, Any]:
    """The same keys, from the engine itself where it has its own opinion.

    `accumulation` and `max_grad_norm` are what the loop applies; DeepSpeed's engine overrules both.
    """
    connected = connected_processes(accelerator.device)
    seen = {
        "world_size": connected,
        "engine": engine_of(model),
        "distributed_type": accelerator.distributed_type.value,
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "per_device_batch_size": per_device_batch_size,
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": max_grad_norm,
        "mode": mode,
    }
    if accelerator.distributed_type == "DEEPSPEED":
        seen |= observed_deepspeed(model)
    return seen | {"global_batch_size": connected * seen["per_device_batch_size"] * seen["gradient_accumulation_steps"]}


def connected_processes(device: torch.device) -> int:
    """How many processes really answer: the sum of ones over the process group."""
    ones = torch.ones(1, device=device)
    if dist.is_initialized():
        dist.all_reduce(ones)
    return int(ones.item())


def engine_of(model: Any) -> str:
    """The engine by the class and state of the wrapped model (one of profiles.ENGINES)."""
    if hasattr(model, "zero_optimization_stage"):
        return str(observed_deepspeed(model)["engine"])
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return "ddp"
    # The root is never resharded after forward, since backward begins with it; the blocks below show the setting.
    blocks = [module for module in list(model.modules())[1:] if isinstance(module, FSDPModule)]
    groups = [group for block in blocks if (group := block._get_fsdp_state()._fsdp_param_group)]
    if not groups:
        return "single"
    if groups[0].mesh_info.mesh.ndim == 2:
        return "hsdp"
    return "fsdp" if any(group.post_forward_mesh_info is not None for group in groups) else "fsdp_grad_op"


def check(asked: Mapping[str, Any], seen: Mapping[str, Any], world: World) -> None:
    """Every rank must see what was asked for, and the same. Raises RunError(outcome="invalid") with each difference."""
    problems = list(world.contradictions)
    problems += [f"{key}: asked for {asked[key]}, observed {seen[key]}" for key in asked if asked[key] != seen[key]]
    for rank, (others, other_problems) in enumerate(all_gather((dict(seen), problems))):
        problems += [problem for problem in other_problems if problem not in problems]
        if others != dict(seen):
            problems.append(f"rank {rank} observes {others}, rank {world.rank} {dict(seen)}")
    if problems:
        raise RunError(
            "this is not the run that was asked for:\n  " + "\n  ".join(problems),
            outcome="invalid",
            hint="make the launcher, the environment and the run config say the same",
        )


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def hardware(device: torch.device) -> dict[str, Any]:
    facts = {
        "device": device.type,
        "device_name": platform.processor() or platform.machine(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "threads_per_process": torch.get_num_threads(),
        "host": socket.gethostname(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device_name": properties.name,
            "device_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "device_count": torch.cuda.device_count(),
        }
    return facts


def _distributed_type(engine: str, has_gpu: bool) -> str:
    if engine.startswith("zero"):
        return "DEEPSPEED"
    if engine.startswith(("fsdp", "hsdp")):
        return "FSDP"
    return "NO" if engine == "single" else "MULTI_GPU" if has_gpu else "MULTI_CPU"
