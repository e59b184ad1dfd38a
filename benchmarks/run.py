"""`make bench`: how much the tool itself costs. Bare DDP loop, custom mode and trainer mode on the same batches,
2 processes, in alternation; ratios of samples per second, paired by round, with a 95% interval.

Writes runs/bench/results.json. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scaletool.config import RunConfig
from scaletool.record import read_json, write_json
from scaletool.sweep.stats import ratio

OUT = Path("runs/bench")
MODEL = {"d_model": 256, "d_ff": 1024, "d_kv": 32, "num_heads": 8, "num_layers": 4, "vocab_size": 264}
PROGRAMS = ("bare", "custom", "trainer")
RESULT_FILES = {"bare": "bare.json", "custom": "record.json", "trainer": "record.json"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    model = _model_config()
    speeds: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    for round_number in range(options.rounds):
        order = PROGRAMS if round_number % 2 == 0 else PROGRAMS[::-1]
        for program in order:
            window = _measure(program, round_number, model, options)
            speeds[program].append(window["samples"] / window["seconds"])
            print(
                f"round {round_number + 1}  {program:8} {speeds[program][-1]:8.2f} samples/s",
                file=sys.stderr,
                flush=True,
            )
    results = {
        "ratios": {
            f"{above}/{below}": _ratio(speeds[above], speeds[below])
            for above, below in (("custom", "bare"), ("trainer", "custom"))
        },
        "samples_per_second": speeds,
        "processes": options.processes,
        "machine": {"processor": platform.processor() or platform.machine(), "cpu_count": os.cpu_count()},
    }
    write_json(OUT / "results.json", results)
    for name, result in results["ratios"].items():
        print(
            f"{name:16} {result['median']:.3f}  [{result['low']:.3f}, {result['high']:.3f}]  {result['rounds']} rounds"
        )
    print(f"written to {OUT / 'results.json'}")


def _model_config() -> Path:
    """A T5 that keeps the two cores busy long enough per step for overheads to be told from noise."""
    folder = OUT / "model"
    write_json(
        folder / "config.json",
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0, **MODEL},
    )
    return folder


def _measure(program: str, round_number: int, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    out = (OUT / program / f"r{round_number + 1}").resolve()
    config = RunConfig().replace(
        model__name=str(model.resolve()),
        train__mode="custom" if program == "bare" else program,
        train__max_steps=5 + options.steps,
        train__log_every=10**9,
        train__output_dir=str(out),
        train__precision="fp32",  # the bare loop has no autocast
        data__per_device_batch_size=4,
        launch__measured=True,
    )
    write_json(out / "run.json", config.to_dict())
    module = "benchmarks.bare_ddp" if program == "bare" else "scaletool.train"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc_per_node", str(options.processes), "-m", module, str(out / "run.json")]
    with (out / "log").open("w") as log:
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, check=False)
    result = read_json(out / RESULT_FILES[program])
    if result is None or not result["window"]["seconds"]:
        sys.exit(f"{program} left no measurement; see {out / 'log'}")
    return dict(result["window"])


def _ratio(above: list[float], below: list[float]) -> dict[str, Any]:
    estimate = ratio(above, below)
    return {"median": estimate.median, "low": estimate.low, "high": estimate.high, "rounds": len(above)}


if __name__ == "__main__":
    main()
