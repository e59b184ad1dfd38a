"""Validation loss: the mean over all real target tokens, on any engine and world size, with no logits kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device

from scaletool.train.loss import loss_share


@dataclass
class Validation:
    """The held-out batches of this rank; every rank has the same number of them."""

    loader: Any

    @torch.no_grad()
    def loss(self, model: torch.nn.Module, device: torch.device) -> float:
        """Every rank must call it: sharded engines gather weights in every forward."""
        model.eval()
        total, tokens = torch.zeros(1, device=device), 0
        for batch in self.loader:
            batch = send_to_device(batch, device)
            step_tokens = batch["info"].micro.step_target_tokens
            total += loss_share(model, batch) * step_tokens
            tokens += step_tokens
        if dist.is_initialized():
            dist.all_reduce(total)
        model.train()
        return float(total / tokens)
