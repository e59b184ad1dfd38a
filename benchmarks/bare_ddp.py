"""The yardstick: a hand-written PyTorch DDP loop, nothing of accelerate, Trainer or scaletool in it but the batches.

Run by torchrun with a run.json; leaves bare.json with the measured window.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scaletool.config import load_config
from scaletool.record import write_json
from scaletool.train.run import build
from scaletool.train.world import read_world


def main(path: str) -> None:
    config = load_config(path).run
    out = Path(str(config.train.output_dir))
    run = build(config, read_world(config), out)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", run.world.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    model: Any = DistributedDataParallel(run.model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate, weight_decay=0.01)
    model.train()
    samples, started = 0, 0.0
    for step, batch in enumerate(run.loader):
        if step == config.measure.warmup_steps:
            dist.barrier()
            started = time.perf_counter()
        inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask", "labels")}
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        samples += len(batch["info"].rows) if started else 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    totals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(totals, {"seconds": seconds, "samples": samples})
    if dist.get_rank() == 0:
        window = {"seconds": max(t["seconds"] for t in totals), "samples": sum(t["samples"] for t in totals)}
        write_json(out / "bare.json", {"window": window, "loss": float(loss)})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
