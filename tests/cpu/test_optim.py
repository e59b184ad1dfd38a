"""Optimizer groups and the learning rate of every step, by hand."""

from __future__ import annotations

import pytest
import torch

from scaletool.config import TrainConfig
from scaletool.train.optim import build_optimizer, build_scheduler, learning_rate_factor

ROOT = 2**0.5


@pytest.mark.parametrize(
    ("schedule", "warmup", "total", "expected"),
    [
        ("constant", 0, 4, [1, 1, 1, 1]),
        ("constant", 4, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", 0, 4, [1, 0.75, 0.5, 0.25, 0, 0]),
        ("linear", 2, 6, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", 0, 4, [1, (2 + ROOT) / 4, 0.5, (2 - ROOT) / 4, 0, 0]),
        ("cosine", 1, 3, [1, 1, 0.5, 0]),
        ("linear", 5, 3, [0.2, 0.4, 0.6]),  # a run that ends within its warm-up
        ("linear", 3, 3, [1 / 3, 2 / 3, 1, 1, 0]),
    ],
)
def test_schedule(schedule: str, warmup: int, total: int, expected: list[float]) -> None:
    config = TrainConfig(schedule=schedule, warmup_steps=warmup)  # type: ignore[arg-type]
    factors = [learning_rate_factor(step, config, total) for step in range(len(expected))]
    assert factors == pytest.approx(expected, abs=1e-12)


def test_scheduler_follows_the_factors() -> None:
    config = TrainConfig(schedule="linear", warmup_steps=2, learning_rate=0.5)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), config)
    scheduler = build_scheduler(optimizer, config, 6)
    rates = []
    for _ in range(6):
        rates.append(scheduler.get_last_lr()[0])
        assert {group["lr"] for group in optimizer.param_groups} == {rates[-1]}
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.375, 0.25, 0.125])


def test_decay_on_matrices_only() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    model[2].weight.requires_grad = False
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.3))
    decayed, plain = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert [parameter.shape for parameter in decayed["params"]] == [(8, 4)]
    assert [parameter.shape for parameter in plain["params"]] == [(4,), (4,), (4,)]


def test_shared_weight_is_given_once() -> None:
    table = torch.nn.Embedding(8, 4)
    optimizer = build_optimizer(torch.nn.ModuleList([table, table]), TrainConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1


def test_an_overflow_is_seen_as_a_skipped_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real scaler and accelerate's wrapper: what decides whether the schedule advances and the record says so."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.cuda, "is_available", lambda: True)
        inner = build_optimizer(model, TrainConfig(precision="fp16"))
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 4.0
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert not torch.equal(model.weight, before)
