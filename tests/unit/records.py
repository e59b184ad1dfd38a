"""Made-up records in the shape of the worker's, for the driver's tests."""

from __future__ import annotations

from typing import Any


def good_record(
    step_seconds: float = 0.1,
    *,
    gpus: int = 1,
    steps: int = 4,
    warmup: int = 2,
    stamp: str | None = None,
    samples: int = 8,
) -> dict[str, Any]:
    """Every rank takes step_seconds, a tenth of it waiting for data; 100 real and 150 padded tokens per sample."""
    rows = [
        {
            "step": number + 1,
            "loss": 6.0 - number / 10,
            "grad_norm": 1.0,
            "learning_rate": 1e-4,
            "loss_scale": None,
            "skipped": False,
            "seconds": step_seconds,
            "data_wait_seconds": step_seconds / 10,
            "samples": samples * gpus,
            "source_tokens": 80 * samples * gpus,
            "target_tokens": 20 * samples * gpus,
            "padded_tokens": 150 * samples * gpus,
        }
        for number in range(warmup + steps)
    ]
    measured = rows[warmup:]
    return {
        "schema": 1,
        "outcome": "ok",
        "reason": "",
        "exit_status": 0,
        "stamp": stamp,
        "warmup_steps": warmup,
        "steps": rows,
        "window": {
            "seconds": step_seconds * steps,
            "samples": sum(row["samples"] for row in measured),
            "real_tokens": sum(row["source_tokens"] + row["target_tokens"] for row in measured),
            "padded_tokens": sum(row["padded_tokens"] for row in measured),
        },
        "ranks": [
            {"rank": rank, "seconds": [row["seconds"] for row in rows], "data_wait_seconds": [], "peak_memory_bytes": 1}
            for rank in range(gpus)
        ],
        "memory": {"peak_bytes": 1000},
    }
