"""The forum thread's custom loop, as posted: a stream through accelerate's dispatcher, everything padded to 512,
metrics every step.

Left as it was: `IterableDataset.from_generator`, `DataCollatorForSeq2Seq(padding="max_length")` for inputs and labels,
`prepare` of loader, model, optimizer and scheduler, AdamW 1e-5, no clipping, argmax and three `.item()` a step,
`wait_for_everyone` a step. Changed: rows come tokenised (the thread's tokeniser was never posted), model and data are
built on every rank instead of being broadcast as pickles, no files are written (the thread wrote its metrics every
1,000 steps), its unposted helper that logs NaN losses is left out, steps are counted and timed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, get_scheduler

from benchmarks.common import Window, as_lists, open_run
from scaletool.config import RunConfig
from scaletool.train.data.tokenise import TokenisedData
from scaletool.train.world import world_size

N_POSITIONS = 512  # T5Config.n_positions, to which the thread padded


def posted_stream(config: RunConfig, data: TokenisedData) -> IterableDataset:
    rows = even_steps(as_lists(data), config.data.per_device_batch_size * world_size(), config.data.seed)

    def generate() -> Iterator[dict[str, Any]]:
        for row in rows:
            yield {**row, "attention_mask": [1] * len(row["input_ids"])}

    return IterableDataset.from_generator(generate)


def even_steps(rows: list[dict[str, Any]], rows_per_step: int, seed: int) -> list[dict[str, Any]]:
    """Rows in a random order in which every step gets about the mean number of tokens.

    Everything is padded to 512, so a step takes as long whatever rows it holds; but real tokens per second of the few
    steps that such a program can be given would be those of the rows that happen to be drawn.
    """
    order = random.Random(seed)
    steps = len(rows) // rows_per_step
    kept = order.sample(rows, steps * rows_per_step)
    kept.sort(key=lambda row: len(row["input_ids"]) + len(row["labels"]))
    batches = [kept[start::steps] for start in range(steps)]
    for batch in batches:
        order.shuffle(batch)
    order.shuffle(batches)
    return [row for batch in batches for row in batch]


def main(path: str) -> None:
    config, tokenizer, data, model = open_run(path)
    accelerator = Accelerator()
    collator = DataCollatorForSeq2Seq(tokenizer=tokenizer, model=model, padding="max_length", max_length=N_POSITIONS)
    batch_size = config.data.per_device_batch_size
    loader: Any = DataLoader(posted_stream(config, data), batch_size=batch_size, shuffle=False, collate_fn=collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)
    scheduler = get_scheduler("constant", optimizer=optimizer)
    loader = accelerator.prepare(loader)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model.train()
    totals = {"loss_sum": 0.0, "corrects_sum": 0, "valid_toks": 0}
    window = Window(config)
    for step, batch in enumerate(loader, start=1):
        window.count(batch)
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
        loss = outputs.loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        predictions = outputs.logits.argmax(dim=-1)
        valids_mask = batch["labels"] != -100
        totals["corrects_sum"] += (predictions[valids_mask] == batch["labels"][valids_mask]).sum().item()
        totals["valid_toks"] += valids_mask.sum().item()
        totals["loss_sum"] += loss.item()
        accelerator.wait_for_everyone()
        window.end_step()
        if step == window.last_step:
            break
    window.close()


if __name__ == "__main__":
    main(sys.argv[1])
