"""The real DDP, ZeRO and FSDP engines on a machine without GPUs, over gloo. Does nothing where a GPU is present.

accelerate 1.15 enters its FSDP and DeepSpeed branches only for GPU backends: on a CPU the GPU
configs end as separate single processes that all train the same data, silently. Naming gloo in the
one method that picks the backend is enough; everything after it is the libraries' own code.
Such runs prove wiring and parity. They say nothing about GPU speed or fp16.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from scaletool.train.world import World, pin_to_cpu


def enable(world: World) -> None:
    """Call before the first Accelerator or TrainingArguments."""
    if torch.cuda.is_available():
        return
    pin_to_cpu()
    if world.engine.startswith("zero"):
        _skip_shared_memory_build()
    if world.engine == "single":
        return
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    choose = PartialState._prepare_backend

    def prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        if cpu or sagemaker_dp:
            return choose(self, cpu, sagemaker_dp, backend)
        # MULTI_GPU opens accelerate's FSDP branch; DDP under that name would be given CUDA device ids.
        return "gloo", DistributedType.MULTI_GPU if world.engine.startswith(
            ("fsdp", "hsdp")
        ) else DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend


def _skip_shared_memory_build() -> None:
    """Keep DeepSpeed from compiling its CPU shared-memory collectives: half a minute on the first run, and a lock
    file that hangs every later run when that build is killed. gloo does the work instead."""
    # By module name: `deepspeed.comm.torch` as an attribute is torch itself, which that module imports.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
