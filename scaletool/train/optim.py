"""Optimizer and schedule, built the same way for both modes."""

from __future__ import annotations

import math

import torch

from scaletool.config import TrainConfig


def build_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; decay on matrices, not on layer-norm scales."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    scales = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    # Under torch's fp16 scaler a fused step hides its overflow: accelerate would take a skipped step for a made one.
    fused = not (torch.cuda.is_available() and config.precision == "fp16")
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=fused)


def learning_rate_factor(step: int, config: TrainConfig, total_steps: int) -> float:
    """Share of the peak learning rate at a step counted from 0: linear warm-up, then constant, linear or cosine."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Counts optimizer steps. Never give it to `accelerator.prepare`: it would step once per process."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, total_steps))
