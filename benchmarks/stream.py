"""Reading a stream whose rows cost 10 ms each: scaletool's loader with workers, and accelerate's default dispatcher.

The same plain loop, tiny model and batches of 4 on both sides; the 10 ms stand for tokenising, fetching or decoding.
The dispatcher reads all rows in the first process. It gets them tokenised, ours tokenises besides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import IterableDataset
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq

from benchmarks.common import Window, as_lists, open_run
from scaletool.train.data.batches import ShardSampler, make_loader
from scaletool.train.data.shards import arrange
from scaletool.train.data.stream import StreamedData, load_stream
from scaletool.train.world import cache_folder

SECONDS_PER_ROW = 0.010


class SlowStream(StreamedData):
    """At module level, so that loader processes can unpickle it."""

    def pairs(self, indices: Sequence[int]) -> list[Any]:
        time.sleep(SECONDS_PER_ROW * len(indices))
        return super().pairs(indices)


def ours(config: Any, tokenizer: Any) -> Any:
    data, _ = load_stream(config, cache_folder(config), tokenizer)
    slow = SlowStream(data.source, data.tokenizer, data.data)
    order, plan, _ = arrange(slow, config, dist.get_world_size())
    sampler = ShardSampler(
        order,
        None,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        per_device_batch_size=plan.per_device_batch_size,
        steps=range(plan.optimizer_steps),
    )
    return make_loader(slow, sampler, tokenizer.pad_token_id, num_workers=config.data.num_workers)


def dispatcher(config: Any, tokenizer: Any, rows: list[dict[str, Any]], accelerator: Accelerator) -> Any:
    def generate() -> Iterator[dict[str, Any]]:
        for row in rows:
            time.sleep(SECONDS_PER_ROW)
            yield {**row, "attention_mask": [1] * len(row["input_ids"])}

    # The dispatcher joins the batches of all ranks, so these must have one length.
    padding: dict[str, Any] = {"padding": "max_length", "max_length": config.data.max_source_tokens}
    collator = DataCollatorForSeq2Seq(tokenizer, None, **padding)
    loader = DataLoader(
        IterableDataset.from_generator(generate), batch_size=config.data.per_device_batch_size, collate_fn=collator
    )
    return accelerator.prepare(loader)


def main(name: str, path: str) -> None:
    config, tokenizer, data, model = open_run(path)
    accelerator = Accelerator()
    loader = ours(config, tokenizer) if name == "ours" else dispatcher(config, tokenizer, as_lists(data), accelerator)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    window = Window(config)
    for step, batch in enumerate(loader, start=1):
        window.count(batch)
        wrapped(**{key: batch[key] for key in ("input_ids", "attention_mask", "labels")}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        window.end_step()
        if step == window.last_step:
            break
    window.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
