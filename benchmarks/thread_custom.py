"""The forum thread's custom loop, as posted: stream through accelerate's dispatcher, everything padded to 512, metrics
every step.

Left as it was: `IterableDataset.from_generator`, `DataCollatorForSeq2Seq(padding="max_length")` for inputs and labels,
`prepare` of loader, model, optimizer and scheduler, AdamW 1e-5, no clipping, argmax and three `.item()` a step,
`wait_for_everyone` a step. Changed: rows come tokenised (the thread's tokeniser was never posted), model and data are
built on every rank instead of being broadcast as pickles, no files are written, steps are counted and timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, get_scheduler

from benchmarks.common import Window, as_lists, open_run

N_POSITIONS = 512  # T5Config.n_positions, to which the thread padded


def stream(rows: list[dict[str, Any]]) -> IterableDataset:
    def generate() -> Iterator[dict[str, Any]]:
        for row in rows:
            yield {**row, "attention_mask": [1] * len(row["input_ids"])}

    return IterableDataset.from_generator(generate)


def main(path: str) -> None:
    config, tokenizer, data, model = open_run(path)
    accelerator = Accelerator()
    collator = DataCollatorForSeq2Seq(tokenizer=tokenizer, model=model, padding="max_length", max_length=N_POSITIONS)
    loader: Any = DataLoader(
        stream(as_lists(data)), batch_size=config.data.per_device_batch_size, shuffle=False, collate_fn=collator
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)
    scheduler = get_scheduler("constant", optimizer=optimizer)
    loader = accelerator.prepare(loader)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model.train()
    totals = {"loss_sum": 0.0, "corrects_sum": 0, "valid_toks": 0}
    window, last = Window(config), int(config.train.max_steps or 0)
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
        if step == last:
            break
    window.close()


if __name__ == "__main__":
    main(sys.argv[1])
