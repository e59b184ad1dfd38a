"""What all programs of the benchmark share: rows, model, and one way to count and time a window of steps."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.figures import imbalance
from scaletool.config import RunConfig, load_config
from scaletool.record import write_json
from scaletool.train.data.tokenise import TokenisedData, load_data
from scaletool.train.data.tokenizer import load_tokenizer
from scaletool.train.model import build_model
from scaletool.train.world import cache_folder

WINDOW_FILE = "window.json"


def open_run(path: str) -> tuple[RunConfig, Any, TokenisedData, Any]:
    """(run config, tokenizer, tokenised rows, model with transformers' own forward) of a run.json."""
    config = load_config(path).run
    cache = cache_folder(config)
    tokenizer = load_tokenizer(config, cache)
    model: Any = build_model(config, tokenizer)
    del model.forward
    return config, tokenizer, load_data(config, cache, tokenizer)[0], model


def as_lists(data: TokenisedData) -> list[dict[str, list[int]]]:
    """Rows as the stock collators want them."""
    pairs = data.pairs(range(len(data)))
    return [{"input_ids": pair.source.tolist(), "labels": pair.target.tolist()} for pair in pairs]


class Window:
    """Counts the batches of the steps after warm-up, and the time from the end of the last warm-up step, which all
    ranks leave together, to the end of the last step. scaletool's own meter measures its runs in the same way."""

    def __init__(self, config: RunConfig) -> None:
        self.out, self.warmup_steps = Path(str(config.train.output_dir)), config.measure.warmup_steps
        self.last_step = int(config.train.max_steps or 0)
        self.steps, self.started, self.ended = 0, 0.0, 0.0
        self.real: list[int] = []
        self.padded = self.samples = 0

    def count(self, batch: dict[str, Any]) -> None:
        """A batch of `input_ids`, `attention_mask` and `labels` that this rank trains on."""
        if not self.started:
            return
        self.real.append(int(batch["attention_mask"].sum()) + int((batch["labels"] != -100).sum()))
        self.padded += batch["input_ids"].numel() + batch["labels"].numel()
        self.samples += int((batch["labels"] != -100).any(dim=1).sum())

    def end_step(self) -> None:
        now = time.perf_counter()
        self.steps += 1
        if self.steps == self.last_step:
            self.ended = now
        elif self.steps == self.warmup_steps:
            if dist.is_initialized():
                dist.barrier()
            self.started = time.perf_counter()

    def close(self) -> None:
        """Join the ranks, and write the window. Every rank must call it."""
        if self.steps != self.last_step:
            raise RuntimeError(f"{self.last_step} steps were asked for, {self.steps} made")
        own = {
            "seconds": self.ended - self.started,
            "real": self.real,
            "padded": self.padded,
            "samples": self.samples,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        ranks: list[Any] = [own]
        if dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, own)
        steps = list(zip(*(rank["real"] for rank in ranks), strict=True))
        window = {
            "seconds": max(rank["seconds"] for rank in ranks),
            "real_tokens": sum(map(sum, steps)),
            "padded_tokens": sum(rank["padded"] for rank in ranks),
            "samples": sum(rank["samples"] for rank in ranks),
            "imbalance": imbalance(steps),
        }
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_json(self.out / WINDOW_FILE, {"window": window, "peak_bytes": max(rank["peak"] for rank in ranks)})
