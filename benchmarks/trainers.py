"""Peers on transformers' own Trainer: the forum thread's, and the stock Seq2SeqTrainer in its two usual settings.

thread_trainer: Trainer on an IterableDataset padded to 512, through the default dispatcher, as posted. Changed:
`tokenizer=` is now `processing_class=`; evaluation, saving and logging, which the thread did a few times per epoch, are
off, so its `compute_metrics` is handed over and not called.
stock_dynamic: rows in random order, padded to the longest of the batch.
stock_grouped: the same with length-grouped sampling, since transformers 5 `train_sampling_strategy="group_by_length"`.

Left at their defaults: everything but batch size, number of steps, the seed of the order, and what would write files or
evaluate. The defaults clip at 1.0 and search for unused parameters every step.
"""

from __future__ import annotations

import sys
from typing import Any

import datasets
import numpy as np
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.common import Window, as_lists, open_run
from benchmarks.thread_custom import N_POSITIONS, posted_stream
from scaletool.config import RunConfig
from scaletool.train.data.tokenise import TokenisedData

QUIET: dict[str, Any] = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}


class EndOfStep(TrainerCallback):  # type: ignore[misc]
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


def compute_t5_metrics(eval_preds: EvalPrediction) -> dict[str, float]:
    """The thread's."""
    predictions, labels = eval_preds.predictions, eval_preds.label_ids
    valid_mask = labels != -100
    predicted_token_ids = np.argmax(predictions, axis=-1)
    corrects_sum = (predicted_token_ids[valid_mask] == labels[valid_mask]).sum()
    valid_toks = valid_mask.sum()
    return {"accuracy": corrects_sum.item() / valid_toks.item() if valid_toks.item() > 0 else 0.0}


def settings(name: str, config: RunConfig, data: TokenisedData) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(trainer class, its arguments, its collator's padding) of a peer."""
    common: dict[str, Any] = {
        "output_dir": str(config.train.output_dir),
        "max_steps": int(config.train.max_steps or 0),
        "per_device_train_batch_size": config.data.per_device_batch_size,
        "seed": config.data.seed,  # of the order; the weights are made already
        **QUIET,
    }
    if name == "thread_trainer":
        arguments: dict[str, Any] = {"args": TrainingArguments(**common), "train_dataset": posted_stream(config, data)}
        return (
            Trainer,
            {**arguments, "compute_metrics": compute_t5_metrics},
            {
                "padding": "max_length",
                "max_length": N_POSITIONS,
            },
        )
    strategy = {"stock_dynamic": "random", "stock_grouped": "group_by_length"}[name]
    args = Seq2SeqTrainingArguments(**common, train_sampling_strategy=strategy)
    return (
        Seq2SeqTrainer,
        {"args": args, "train_dataset": datasets.Dataset.from_list(as_lists(data))},
        {"padding": True},
    )


def main(name: str, path: str) -> None:
    config, tokenizer, data, model = open_run(path)
    window = Window(config)
    trainer_class, arguments, padding = settings(name, config, data)
    trainer = counting(trainer_class, window)(
        model=model,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model, **padding),
        callbacks=[EndOfStep(window)],
        **arguments,
    )
    trainer.train()
    window.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
