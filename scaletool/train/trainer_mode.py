"""transformers' Trainer on the same loader, loss, optimizer and schedule. Read it beside custom_mode.py."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from scaletool.config import RunConfig
from scaletool.train.loss import loss_share
from scaletool.train.optim import build_optimizer, build_scheduler
from scaletool.train.run import Run


class T5Trainer(Trainer):
    """Trainer with everything that scaletool defines once put in the place of its own."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # T5.forward takes **kwargs, so Trainer would hand it num_items_in_batch, which T5 ignores, and then multiply
        # loss and gradient by processes x accumulation. This switches that off, and a gather per step with it.
        run.model.accepts_loss_kwargs = False
        arguments = training_arguments(run.config, run.plan.optimizer_steps)
        super().__init__(model=run.model, args=arguments, callbacks=[StepEnd(run, self)])
        # Our shares are already scaled for accumulation: Trainer must not divide them again.
        self.loss_is_scaled_for_ga = True
        self.remove_callback(PrinterCallback)  # the run prints its own lines, the same in both modes
        clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = lambda *args, **kwargs: self._keep_norm(clip(*args, **kwargs))
        self.grad_norm: Any = None

    def get_train_dataloader(self) -> Any:
        return WatchedLoader(self.run)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = loss_share(model, inputs)
        self.run.meter.micro_step(loss)
        return loss * self.run.plan.world_size  # engines average gradients over ranks; the loss shares add up

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = build_optimizer(self.model, self.run.config.train)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = build_scheduler(self.optimizer, self.run.config.train, num_training_steps)
        return self.lr_scheduler

    def _keep_norm(self, norm: Any) -> Any:
        self.grad_norm = norm
        return norm


class WatchedLoader:
    """The run's loader, seen by the meter. One pass covers the whole run, whatever the number of epochs."""

    def __init__(self, run: Run) -> None:
        self.run, self.dataset = run, run.loader.dataset

    def __len__(self) -> int:
        return len(self.run.loader)

    def __iter__(self) -> Any:
        return self.run.batches()


class StepEnd(TrainerCallback):
    """Reports to the run what the custom loop reports at the same places."""

    def __init__(self, run: Run, trainer: T5Trainer) -> None:
        self.run, self.trainer = run, trainer
        self.learning_rate: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        accelerator = self.trainer.accelerator
        self.run.start(
            accelerator,
            self.trainer.model_wrapped,
            # Trainer accumulates by itself, with an accelerator of 1 that an environment variable can overrule.
            accumulation=args.gradient_accumulation_steps * _own_accumulation(accelerator),
            max_grad_norm=args.max_grad_norm or None,
        )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.learning_rate = self.trainer.lr_scheduler.get_last_lr()[0]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.end_step(self.trainer.grad_norm, self.learning_rate)


def _own_accumulation(accelerator: Any) -> int:
    return 1 if accelerator.distributed_type == "DEEPSPEED" else accelerator.gradient_accumulation_steps


def training_arguments(config: RunConfig, total_steps: int) -> TrainingArguments:
    """The run config in Trainer's words; the defaults that would make it another run than the loop are off."""
    train = config.train
    fp16 = train.precision == "fp16" and torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(train.output_dir),
        max_steps=total_steps,
        per_device_train_batch_size=config.data.per_device_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm or 0.0,  # 0: measured, not clipped
        fp16=fp16,
        bf16=train.precision == "bf16",
        seed=train.seed,
        ddp_find_unused_parameters=False,  # Trainer's default True searches every step; T5 has no unused parameters
        average_tokens_across_devices=False,
        remove_unused_columns=False,
        logging_nan_inf_filter=False,  # the filter replaces NaN losses by their running mean
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )


def train(run: Run) -> None:
    T5Trainer(run).train()
    run.finish()
