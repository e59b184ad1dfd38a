"""Measures a run from the loop's own end-of-step to end-of-step, without waiting for the device in between."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scaletool.errors import ConfigError, RunError
from scaletool.train.data.batches import BatchInfo

COUNTS = ("samples", "source_tokens", "target_tokens", "padded_tokens")


class Meter:
    """Collects one row per optimizer step on every rank and joins the rows of all ranks at the end.

    Device tensors (loss, gradient norm) stay on the device until a log step, the end, or the start of the measured
    window. `on_log(row)` gets the newest step at log steps: the loss of the global batch, times and counts of this
    rank.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        log_every: int,
        warmup_steps: int,
        on_log: Callable[[dict[str, Any]], None],
        samples_path: Path | None = None,
    ) -> None:
        self.device, self.log_every, self.warmup_steps, self.on_log = device, log_every, warmup_steps, on_log
        self.rows: list[dict[str, Any]] = []
        self.flushed = 0
        self.window_start: float | None = None
        self.window_seconds = 0.0
        self._loss: torch.Tensor | None = None
        self._bad_rows: dict[str, None] = {}
        self._samples = samples_path.open("w", encoding="utf-8") if samples_path else None
        self._start_step()

    def watch(self, loader: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Pass batches through; the time spent waiting for each is data wait of the step it belongs to."""
        batches = iter(loader)
        if not self.rows:
            self._start_step()
        if self.warmup_steps == 0:
            self._open_window()
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._data_wait += time.perf_counter() - asked
            if isinstance(batch, ConfigError):
                raise batch
            self._count(batch["info"])
            yield batch

    def micro_step(self, loss_share: torch.Tensor) -> None:
        """Add this rank's share of the step's loss (a device tensor)."""
        share = loss_share.detach()
        self._loss = share if self._loss is None else self._loss + share

    def step(self, *, grad_norm: Any, learning_rate: float, loss_scale: Any, skipped: bool) -> None:
        """End of an optimizer step."""
        now = time.perf_counter()
        self.rows.append(
            {
                "step": len(self.rows) + 1,
                "loss": self._loss,
                "grad_norm": grad_norm,
                "learning_rate": learning_rate,
                "loss_scale": loss_scale,
                "skipped": skipped,
                "seconds": now - self._started,
                "data_wait_seconds": self._data_wait,
                **self._counts,
            }
        )
        self._start_step(now)
        step = len(self.rows)
        if step % self.log_every == 0 or step == 1:
            self._flush()
            self.on_log(self.rows[-1])
        if step == self.warmup_steps:
            self._open_window()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Keep what happens inside (validation) out of the window and of the step that begins."""
        self._synchronize()  # steps still queued on the device belong to the window
        started = time.perf_counter()
        yield
        self._synchronize()
        if self.window_start is not None:
            self.window_start += time.perf_counter() - started
        self._start_step()

    def end_window(self) -> None:
        """The last step is made: what a mode does after it is not measured. A second call changes nothing."""
        if self.window_start is not None and not self.window_seconds:
            self._synchronize()
            self.window_seconds = time.perf_counter() - self.window_start

    def finish(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        """(steps joined over ranks, raw times per rank, measured window). Every rank must call it."""
        self.end_window()
        self._flush()
        if self._samples:
            self._samples.close()
        memory = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _peak_resident_bytes()
        own = {"rows": self.rows, "window_seconds": self.window_seconds, "peak_memory_bytes": memory}
        ranks = all_gather(own)
        steps = [_join([rank["rows"][index] for rank in ranks]) for index in range(min(len(r["rows"]) for r in ranks))]
        measured = steps[self.warmup_steps :]
        window = {
            "seconds": max(rank["window_seconds"] for rank in ranks),
            "steps": len(measured),
            "samples": sum(step["samples"] for step in measured),
            "real_tokens": sum(step["source_tokens"] + step["target_tokens"] for step in measured),
            "padded_tokens": sum(step["padded_tokens"] for step in measured),
        }
        raw = [
            {
                "rank": number,
                "seconds": [row["seconds"] for row in rank["rows"]],
                "data_wait_seconds": [row["data_wait_seconds"] for row in rank["rows"]],
                "real_tokens": [row["source_tokens"] + row["target_tokens"] for row in rank["rows"]],
                "peak_memory_bytes": rank["peak_memory_bytes"],
            }
            for number, rank in enumerate(ranks)
        ]
        return steps, raw, window

    def skipped_of_stream(self) -> dict[str, Any]:
        """Count of the different bad rows that any rank met, and one of them. Every rank must call it."""
        bad = [problem for rank in all_gather(list(self._bad_rows)) for problem in rank]
        return {"skipped_rows": len(set(bad)), "first_skipped": bad[0]} if bad else {}

    def _start_step(self, now: float | None = None) -> None:
        self._started = time.perf_counter() if now is None else now
        self._data_wait = 0.0
        self._loss = None
        self._counts = dict.fromkeys(COUNTS, 0)

    def _count(self, info: BatchInfo) -> None:
        self._counts["samples"] += len(info.rows)
        for name in COUNTS[1:]:
            self._counts[name] += getattr(info, name)
        self._bad_rows |= dict.fromkeys(info.bad_rows)
        if self._samples:
            micro = info.micro
            line = {"epoch": micro.epoch, "step": micro.step, "micro_step": micro.micro_step, "rows": info.rows}
            self._samples.write(json.dumps(line) + "\n")

    def _open_window(self) -> None:
        """All ranks start the measured window together, their devices idle."""
        self._flush()
        self._synchronize()
        if dist.is_initialized():
            dist.barrier()
        self.window_start = time.perf_counter()
        self._start_step(self.window_start)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _flush(self) -> None:
        """Bring the losses and norms of the steps since the last flush to the host, losses summed over ranks."""
        if self._samples:
            self._samples.flush()
        pending = self.rows[self.flushed :]
        if not pending:
            return
        losses = torch.stack([row["loss"].float() for row in pending])
        if dist.is_initialized():
            dist.all_reduce(losses)
        for row, loss in zip(pending, losses.tolist(), strict=True):
            norm, row["loss_scale"] = _to_float(row["grad_norm"]), _to_float(row["loss_scale"])
            if not row["skipped"] and not (math.isfinite(loss) and math.isfinite(norm or 0.0)):
                raise RunError(
                    f"step {row['step']} has loss {loss} and gradient norm {norm}",
                    outcome="diverged",
                    hint="lower train.learning_rate, add train.warmup_steps, or look at the data",
                )
            # A skipped step overflowed; JSON has no word for that.
            row["loss"], row["grad_norm"] = _finite(loss), _finite(norm)
        self.flushed = len(self.rows)


def all_gather(item: Any) -> list[Any]:
    """`item` of every rank, in rank order; [item] where there is one process."""
    if not dist.is_initialized():
        return [item]
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def _join(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One step over all ranks: the slowest rank's time, the mean data wait, the summed counts."""
    joined = dict(rows[0])
    joined["seconds"] = max(row["seconds"] for row in rows)
    joined["data_wait_seconds"] = sum(row["data_wait_seconds"] for row in rows) / len(rows)
    for name in COUNTS:
        joined[name] = sum(row[name] for row in rows)
    return joined


def _to_float(value: Any) -> float | None:
    if value is None:
        return None
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()  # FSDP2's norm is a DTensor
    return float(value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _peak_resident_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
