"""Validation loss: the mean over all real target tokens, on any engine and world size, with no logits kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device

from scaletool.errors import ConfigError
from scaletool.train.loss import loss_sum


@dataclass
class Validation:
    """The held-out batches of this rank; every rank has the same number of them."""

    loader: Any

    @torch.no_grad()
    def loss(self, model: torch.nn.Module, device: torch.device) -> float:
        """Every rank must call it: sharded engines gather weights in every forward."""
        model.eval()
        total = torch.zeros(2, device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        for batch in self.loader:
            if isinstance(batch, ConfigError):
                raise batch
            total[0] += loss_sum(model, send_to_device(batch, device))
            total[1] += batch["info"].target_tokens
        if dist.is_initialized():
            dist.all_reduce(total)
        model.train()
        return float(total[0] / total[1])
