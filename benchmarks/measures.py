"""What needs no training: padding, imbalance between 8 ranks, the start of an order over 100 million rows."""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

from benchmarks.common import open_run
from scaletool.config import RunConfig
from scaletool.record import write_json
from scaletool.train.data.inspect import imbalance, padding_share
from scaletool.train.data.order import GlobalOrder

UNITS, RANKS, BATCH = 100_000_000, 4096, 8
REPEATS = 5


def order_start() -> dict[str, float]:
    """Worst time and memory to the first batch of a rank, over its start and resume points in the first two epochs.

    The time of a point is the median of some repeats, each with a new order that remembers nothing.
    """
    lengths = np.random.default_rng(0).integers(1, 512, UNITS, dtype=np.int32)
    epoch = GlobalOrder(UNITS, RANKS * BATCH).steps_per_epoch
    seconds, memory = [], []
    for step in (0, epoch // 2, epoch - 1, epoch + 4 * epoch // 5):
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            GlobalOrder(UNITS, RANKS * BATCH, lengths=lengths).global_batch(step)
            times.append(time.perf_counter() - started)
        seconds.append(statistics.median(times))
        tracemalloc.start()
        GlobalOrder(UNITS, RANKS * BATCH, lengths=lengths).global_batch(step)
        memory.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return {"order_start_seconds_100m_4096": max(seconds), "order_start_bytes_100m_4096": float(max(memory))}


def shapes(config: RunConfig, sources: np.ndarray, targets: np.ndarray, packed_batch: int) -> dict[str, float]:
    """Padding share per batching, and the imbalance between 8 ranks."""
    found: dict[str, float] = {}
    for name in ("padded", "bucketed", "packed"):
        batch = packed_batch if name == "packed" else config.data.per_device_batch_size
        data = config.replace(data__per_device_batch_size=batch).data
        found[f"padding_share_{name}"] = padding_share(sources, targets, batching=name, data=data)
        found[f"imbalance_8_{name}"] = imbalance(sources, targets, batching=name, data=data, ranks=8)
    return found


def main(path: str, packed_batch: str) -> None:
    config, _, data, _ = open_run(path)
    found = shapes(config, np.asarray(data.source_lengths), np.asarray(data.target_lengths), int(packed_batch))
    write_json(Path(str(config.train.output_dir)) / "measures.json", found | order_start())


if __name__ == "__main__":
    main(*sys.argv[1:3])
