"""Peers on transformers' own Trainer: the forum thread's, and the stock Seq2SeqTrainer in its two usual settings.

thread: an IterableDataset padded to 512 through the default dispatcher, as posted. stock_dynamic: rows in random order,
padded to the longest of the batch. stock_grouped: the same with length-grouped sampling. Left at their defaults:
everything but the number of steps and what would write files or evaluate.
"""

from __future__ import annotations

import sys
from typing import Any

import datasets
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.common import Window, as_lists, open_run
from benchmarks.thread_custom import N_POSITIONS, stream

QUIET: dict[str, Any] = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}


class EndOfStep(TrainerCallback):
    def __init__(self, window: Window) -> None:
        self.window = window

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.window.end_step()


def counting(trainer_class: Any, window: Window) -> Any:
    """The trainer, its batches counted as they are trained on."""

    class Counting(trainer_class):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            window.count(inputs)
            return super().training_step(model, inputs, *args, **kwargs)

    return Counting


def main(name: str, path: str) -> None:
    config, tokenizer, data, model = open_run(path)
    window = Window(config)
    common = {
        "output_dir": str(config.train.output_dir),
        "max_steps": int(config.train.max_steps or 0),
        "per_device_train_batch_size": config.data.per_device_batch_size,
        **QUIET,
    }
    arguments: Any
    if name == "thread_trainer":
        arguments, trainer_class, rows = TrainingArguments(**common), Trainer, stream(as_lists(data))
        padding: dict[str, Any] = {"padding": "max_length", "max_length": N_POSITIONS}
    else:
        if name == "stock_grouped":
            common["train_sampling_strategy"] = "group_by_length"
        arguments, trainer_class = Seq2SeqTrainingArguments(**common), Seq2SeqTrainer
        rows, padding = datasets.Dataset.from_list(as_lists(data)), {"padding": True}
    trainer = counting(trainer_class, window)(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model, **padding),
        callbacks=[EndOfStep(window)],
    )
    trainer.train()
    window.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
