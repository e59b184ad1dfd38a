"""The loop written out, on accelerate. Read it beside trainer_mode.py: everything they share stands elsewhere."""

from __future__ import annotations

from accelerate import Accelerator

from scaletool.train.loss import loss_share
from scaletool.train.optim import build_optimizer, build_scheduler
from scaletool.train.run import Run


def train(run: Run) -> None:
    config = run.config.train
    accelerator = Accelerator(gradient_accumulation_steps=config.gradient_accumulation_steps)
    model, optimizer = accelerator.prepare(run.model, build_optimizer(run.model, config))
    scheduler = build_scheduler(optimizer, config, run.plan.optimizer_steps)
    max_norm = config.max_grad_norm or float("inf")  # inf: the norm is measured, nothing is clipped
    # Engines average gradients over ranks, accelerate divides by the accumulation; the loss shares already add up.
    scale = run.plan.world_size * run.plan.gradient_accumulation_steps

    run.start(
        accelerator, model, accumulation=accelerator.gradient_accumulation_steps, max_grad_norm=config.max_grad_norm
    )
    model.train()
    for batch in run.batches():
        with accelerator.accumulate(model):
            loss = loss_share(model, batch)
            accelerator.backward(loss * scale)
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        run.meter.micro_step(loss)
        if accelerator.sync_gradients:
            learning_rate = scheduler.get_last_lr()[0]
            if not accelerator.optimizer_step_was_skipped:
                scheduler.step()
            run.end_step(grad_norm, learning_rate)
    run.finish()
