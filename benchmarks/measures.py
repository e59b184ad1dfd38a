"""What needs no training: tokenisation against the tokenizers library, padding, imbalance, the start of an order."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import open_run
from scaletool.config import RunConfig
from scaletool.train.data.inspect import imbalance, padding_share
from scaletool.train.data.order import GlobalOrder
from scaletool.train.data.sources import Source
from scaletool.train.data.tokenise import ROWS_PER_CALL, tokenise

UNITS, RANKS, BATCH = 100_000_000, 4096, 8
REPEATS = 5
COPIES = 4  # of the rows, so that one measurement takes seconds


def tokenisation(config: RunConfig, tokenizer: Any, rounds: int) -> dict[str, list[float]]:
    """Rows per second of files to Arrow on disk, and of the library alone on texts in memory, in turn."""
    speeds: dict[str, list[float]] = {"tokenise": [], "tokenizers": []}
    with tempfile.TemporaryDirectory() as folder:
        plain = Source(["stdlib"], config.data, Path(folder) / "stdlib")
        pairs = list(plain) * COPIES
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as stream:
            stream.writelines(json.dumps({"source": pair.source, "target": pair.target}) + "\n" for pair in pairs)
        sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
        for round_number in range(rounds):
            for name in ("tokenise", "tokenizers")[:: 1 if round_number % 2 == 0 else -1]:
                out = Path(folder) / "out"
                started = time.perf_counter()
                if name == "tokenise":
                    out.mkdir()
                    tokenise(Source([str(path)], config.data, Path(folder) / "index"), tokenizer, config.data, out)
                else:
                    _library_alone(tokenizer, sources, config.data.max_source_tokens)
                    _library_alone(tokenizer, targets, config.data.max_target_tokens)
                speeds[name].append(len(pairs) / (time.perf_counter() - started))
                shutil.rmtree(out, ignore_errors=True)
    return speeds


def _library_alone(tokenizer: Any, texts: list[str], limit: int) -> None:
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(limit)
    for start in range(0, len(texts), ROWS_PER_CALL):
        for encoding in backend.encode_batch_fast(texts[start : start + ROWS_PER_CALL]):
            encoding.ids  # noqa: B018  taking the numbers out is part of the library's work


def order_start() -> dict[str, float]:
    """Worst time and memory to the first batch of a rank, over start and resume points in the first two epochs."""
    lengths = np.random.default_rng(0).integers(1, 512, UNITS, dtype=np.int32)
    seconds, memory = [], []
    for step in (0, 1234, 3051, 3052 + 2500):
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


def main(path: str, rounds: str, packed_batch: str) -> None:
    config, tokenizer, data, _ = open_run(path)
    found: dict[str, Any] = {"tokenisation": tokenisation(config, tokenizer, int(rounds))}
    found |= shapes(config, np.asarray(data.source_lengths), np.asarray(data.target_lengths), int(packed_batch))
    found |= order_start()
    (Path(str(config.train.output_dir)) / "measures.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
