"""`make bench`: scaletool against its peers, on the same rows and model, in alternating rounds of one call.

Writes runs/bench/results.json, and docs/benchmarks.md from it. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.common import imbalance
from scaletool.config import RunConfig
from scaletool.record import read_json, write_json
from scaletool.sweep.stats import ratio

OUT = Path("runs/bench")
MODEL = {"d_model": 256, "d_ff": 1024, "d_kv": 32, "num_heads": 8, "num_layers": 4, "vocab_size": 4096}
BATCH, PACKED_BATCH = 8, 4
"""Examples per process and step, and packed rows of 512 tokens: about the same work."""
WARMUP_STEPS = 3
THREAD_STEPS = 4  # measured steps of the programs that pad everything to 512: each takes seconds

PEERS: dict[str, list[str]] = {
    "thread_custom": ["benchmarks.thread_custom"],
    "thread_trainer": ["benchmarks.trainers", "thread_trainer"],
    "stock_dynamic": ["benchmarks.trainers", "stock_dynamic"],
    "stock_grouped": ["benchmarks.trainers", "stock_grouped"],
    "bare": ["benchmarks.bare_ddp"],
}
OURS = {
    f"{batching}/{mode}": {"data__batching": batching, "train__mode": mode}
    for batching, mode in (
        ("padded", "custom"),
        ("bucketed", "custom"),
        ("bucketed", "trainer"),
        ("packed", "custom"),
        ("packed", "trainer"),
    )
}
PROGRAMS = (*PEERS, *OURS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", choices=["steps", "stream", "measures"], help="measure a part, without a report")
    parser.add_argument("--render", action="store_true", help="write docs/benchmarks.md from the measured file")
    options = parser.parse_args()
    if options.render:
        report.write(OUT / "results.json")
        return
    shutil.rmtree(OUT, ignore_errors=True)
    write_json(
        OUT / "model" / "config.json",
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0, **MODEL},
    )
    results: dict[str, Any] = {"ratios": {}, "measures": {}, "programs": {}, "setup": _setup(options)}
    results["machine"] = {"processor": platform.processor() or platform.machine(), "cpu_count": os.cpu_count()}
    if options.only in (None, "measures"):
        _measures(results, options.rounds)
    if options.only in (None, "stream"):
        _streams(results, options.rounds)
    if options.only in (None, "steps"):
        _steps(results, options)
    write_json(OUT / "results.json", results)
    if options.only is None:
        report.write(OUT / "results.json")
    report.show(results)


def _setup(options: argparse.Namespace) -> dict[str, Any]:
    return {"rounds": options.rounds, "steps": options.steps, "batch": BATCH, "packed_batch": PACKED_BATCH, **MODEL}


def _config(out: Path, steps: int, **values: Any) -> RunConfig:
    packed = values.get("data__batching") == "packed"
    settings: dict[str, Any] = {
        "model__name": str((OUT / "model").resolve()),
        "tokenizer__kind": "train",
        "data__max_source_tokens": 512,
        "data__max_target_tokens": 128,
        "data__per_device_batch_size": PACKED_BATCH if packed else BATCH,
        "train__max_steps": WARMUP_STEPS + steps,
        "train__log_every": 10**9,
        "train__output_dir": str(out.resolve()),
        "train__precision": "fp32",  # the peers have no autocast
        "measure__warmup_steps": WARMUP_STEPS,
        "launch__measured": True,
    }
    return RunConfig().replace(**{**settings, **values})


def _launch(words: list[str], config: RunConfig, processes: int, *more: str) -> Path:
    """Run a module on a run.json; returns its folder."""
    out = Path(str(config.train.output_dir))
    write_json(out / "run.json", config.to_dict())
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
    threads = {} if processes == 0 else {"OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "true"}
    with (out / "log").open("w") as log:
        command = [*launcher, *words, str(out / "run.json"), *more]
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}; see {out / 'log'}")
    return out


def _steps(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Every program on 2 processes in alternating rounds, then once on 1."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PROGRAMS}
    for number in range(1, options.rounds + 1):
        for name in PROGRAMS if number % 2 else PROGRAMS[::-1]:
            found[name].append(_program(name, number, options.steps, processes=2))
    alone = {name: _program(name, 1, options.steps, processes=1) for name in PROGRAMS}
    results["programs"] = {
        name: {"2": report.summary(found[name]), "1": report.summary([alone[name]])} for name in PROGRAMS
    }
    speeds = {name: [run["real_tokens_per_second"] for run in runs] for name, runs in found.items()}
    best = max(OURS, key=lambda name: statistics.median(speeds[name]))
    batching = max((name for name in OURS if name.endswith("custom")), key=lambda name: statistics.median(speeds[name]))
    thread = max(("thread_custom", "thread_trainer"), key=lambda name: statistics.median(speeds[name]))
    results["setup"] |= {"best": best, "thread": thread}
    pairs = {
        "best/thread": (best, thread),
        "best/stock_dynamic": (best, "stock_dynamic"),
        "best/stock_grouped": (best, "stock_grouped"),
        "trainer/custom": (batching.replace("custom", "trainer"), batching),
        "custom/bare": ("bucketed/custom", "bare"),
    }
    results["ratios"] |= {name: _ratio(speeds[above], speeds[below]) for name, (above, below) in pairs.items()}
    results["measures"]["imbalance_8"] = results["measures"].get(f"imbalance_8_{best.split('/')[0]}")


def _program(name: str, round_number: int, steps: int, processes: int) -> dict[str, Any]:
    out = OUT / str(processes) / name.replace("/", "-") / f"r{round_number}"
    steps = THREAD_STEPS if name.startswith("thread") else steps
    if name in OURS:
        folder = _launch(["scaletool.train"], _config(out, steps, **OURS[name]), processes)
        record: Any = read_json(folder / "record.json")
        ranks = [rank["real_tokens"][WARMUP_STEPS:] for rank in record["ranks"]]
        window = {**record["window"], "imbalance": imbalance(list(zip(*ranks, strict=True)))}
        memory = record["memory"]["peak_bytes"]
    else:
        folder = _launch(PEERS[name], _config(out, steps), processes)
        content: Any = read_json(folder / "window.json")
        window, memory = content["window"], content["peak_bytes"]
    speed = window["real_tokens"] / window["seconds"]
    print(f"{processes} processes, round {round_number}  {name:16} {speed:8.0f} real tokens/s", file=sys.stderr)
    return {
        "real_tokens_per_second": speed,
        "padding_share": 1 - window["real_tokens"] / window["padded_tokens"],
        "imbalance": window["imbalance"],
        "peak_bytes": memory,
    }


def _streams(results: dict[str, Any], rounds: int) -> None:
    speeds: dict[str, list[float]] = {"ours": [], "dispatcher": []}
    for number in range(1, rounds + 1):
        for name in ("ours", "dispatcher")[:: 1 if number % 2 else -1]:
            config = _config(
                OUT / "stream" / name / f"r{number}",
                40,
                model__name="tiny",
                tokenizer__kind="bytes",
                data__max_source_tokens=64,
                data__max_target_tokens=32,
                data__per_device_batch_size=4,
                data__streaming=name == "ours",
                data__num_workers=2,
            )
            content: Any = read_json(_launch(["benchmarks.stream", name], config, 2) / "window.json")
            speeds[name].append(content["window"]["samples"] / content["window"]["seconds"])
            print(f"stream, round {number}  {name:12} {speeds[name][-1]:8.1f} rows/s", file=sys.stderr)
    results["ratios"]["stream/dispatcher"] = _ratio(speeds["ours"], speeds["dispatcher"])


def _measures(results: dict[str, Any], rounds: int) -> None:
    config = _config(OUT / "measures", 1)
    folder = _launch(["benchmarks.measures"], config, 0, str(max(5, rounds)), str(PACKED_BATCH))
    found: Any = read_json(folder / "measures.json")
    speeds = found.pop("tokenisation")
    results["ratios"]["tokenise/tokenizers"] = _ratio(speeds["tokenise"], speeds["tokenizers"])
    results["measures"] |= found


def _ratio(above: list[float], below: list[float]) -> dict[str, Any]:
    return ratio(above, below).to_dict()


if __name__ == "__main__":
    main()
