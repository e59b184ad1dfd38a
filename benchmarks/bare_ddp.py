"""The yardstick: a hand-written PyTorch DDP loop, nothing of accelerate, Trainer or scaletool in it but the batches.

The batches are those of scaletool's own loader, so custom/bare is the cost of the tool alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Window, open_run, start_gloo
from scaletool.train.data.shards import load_shards
from scaletool.train.world import cache_folder


def main(path: str) -> None:
    config, tokenizer, _, model = open_run(path)
    device = start_gloo()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loader = load_shards(config, cache_folder(config), tokenizer, rank=rank, world_size=world_size).loader
    wrapped: Any = DistributedDataParallel(model.to(device)) if dist.is_initialized() else model.to(device)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=config.train.learning_rate, weight_decay=0.01)
    wrapped.train()
    window = Window(config)
    for batch in loader:
        window.count(batch)
        inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask", "labels")}
        loss = wrapped(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        window.end_step()
    window.close()


if __name__ == "__main__":
    main(sys.argv[1])
