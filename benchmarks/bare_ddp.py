"""The yardstick: a hand-written PyTorch DDP loop, nothing of accelerate, Trainer or scaletool in it but the batches.

The batches are those of scaletool's own loader, so custom/bare is the cost of the tool alone. Loss and forward are
transformers' own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Window, open_run
from scaletool.train.data.shards import load_shards
from scaletool.train.world import cache_folder


def main(path: str) -> None:
    config, tokenizer, _, model = open_run(path)
    rank, world_size, wrapped = 0, 1, model
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        rank, world_size, wrapped = dist.get_rank(), dist.get_world_size(), DistributedDataParallel(model)
    loader: Any = load_shards(config, cache_folder(config), tokenizer, rank=rank, world_size=world_size).loader
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=config.train.learning_rate, weight_decay=0.01)
    wrapped.train()
    window = Window(config)
    for batch in loader:
        window.count(batch)
        loss = wrapped(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        window.end_step()
    window.close()


if __name__ == "__main__":
    main(sys.argv[1])
