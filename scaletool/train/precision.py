"""Half precision: what the GPU can do, and the loss scale of every engine."""

from __future__ import annotations

from typing import Any

import torch

from scaletool.config import RunConfig
from scaletool.errors import ConfigError, EnvironmentFault

BF16_CAPABILITY = 8
"""First compute capability with bf16 tensor cores; a V100 (7.0) emulates them, slowly and silently."""

INITIAL_LOSS_SCALE = 2.0**12
GROWTH_INTERVAL = 500
"""As in ds_configs/*.json, so that the engines skip the same first steps; torch's own start, 2^16, wastes some."""


def refuse_unfit_gpu(config: RunConfig) -> None:
    """Raises before anything is loaded where the GPU cannot do what is asked, or torch has no kernels for it."""
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    if config.train.precision == "bf16" and major < BF16_CAPABILITY:
        raise ConfigError(
            f"bf16 on a GPU of compute capability {major}.{minor} is emulated: slower than float32, without a warning",
            where="train.precision",
            hint="set train.precision: fp16",
        )
    kernels = [name for name in torch.cuda.get_arch_list() if name.startswith(f"sm_{major}")]
    if not any(int(name.removeprefix("sm_").rstrip("af")) <= 10 * major + minor for name in kernels):
        raise EnvironmentFault(
            f"torch {torch.__version__} has no kernels for compute capability {major}.{minor}"
            f" (it has {', '.join(torch.cuda.get_arch_list())})",
            hint="install a cu126 wheel of torch >=2.6,<2.15: the last line that still serves the V100",
        )


def start_loss_scale(accelerator: Any) -> None:
    """Give torch's scaler (DDP and FSDP) the start that the DeepSpeed files give theirs."""
    if accelerator.scaler is not None:
        state = accelerator.scaler.state_dict()
        accelerator.scaler.load_state_dict({**state, "scale": INITIAL_LOSS_SCALE, "growth_interval": GROWTH_INTERVAL})


def loss_scale(accelerator: Any, wrapped: Any) -> Any:
    """The scale that the next step will use, left on the device (get_scale would wait for it); None without fp16."""
    if accelerator.scaler is not None:
        return accelerator.scaler.scale(torch.ones((), device=accelerator.device))
    if hasattr(wrapped, "fp16_enabled") and wrapped.fp16_enabled():
        return float(wrapped.optimizer.loss_scale)
    return None
