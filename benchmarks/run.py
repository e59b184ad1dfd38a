"""`make bench`: scaletool against its peers, on the same rows and model, in alternating rounds of one call.

Writes runs/bench/results.json, and docs/benchmarks.md from it; about 20 minutes on 2 cores. Nothing else should run
meanwhile. Everything runs on the CPU, also where there are GPUs. Every peer's file says what it is.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.figures import imbalance, step_ratios
from scaletool.config import RunConfig
from scaletool.record import read_json, write_json
from scaletool.sweep.stats import ratio

OUT = Path("runs/bench")
MODEL = {"d_model": 256, "d_ff": 1024, "d_kv": 32, "num_heads": 8, "num_layers": 4, "vocab_size": 4096}
BATCH, PACKED_BATCH = 8, 3
"""Examples per process and step, and packed rows of 512 tokens: about as many real tokens a step, 1,500."""
STEPS, WARMUP_STEPS = 25, 2
"""Measured steps of Trainer's length-grouped sampling on 2 processes. They are one of its groups (50 batches), which
goes from long to short: a part of one would measure only its long or its short rows."""
SHORTER = {"thread_custom": 12, "thread_trainer": 12}
SHORTER |= {"stock_dynamic": 4, "padded/custom": 4, "padded/trainer": 4}
"""By what the number of steps of a program is divided, for a benchmark of bearable length; 2 where it is not here."""
STREAM_STEPS = 40
PARTS = ("tokenise", "measures", "stream", "steps")
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers")

PEERS: dict[str, list[str]] = {
    "thread_custom": ["benchmarks.thread_custom"],
    "thread_trainer": ["benchmarks.trainers", "thread_trainer"],
    "stock_dynamic": ["benchmarks.trainers", "stock_dynamic"],
    "stock_grouped": ["benchmarks.trainers", "stock_grouped"],
    "bare": ["benchmarks.bare_ddp"],
}
OURS = {
    f"{batching}/{mode}": {"data__batching": batching, "train__mode": mode}
    for batching in ("padded", "bucketed", "packed")
    for mode in ("custom", "trainer")
}
PROGRAMS = (*PEERS, *OURS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"of stock_grouped, others have a part; multiples of {STEPS}"
    )
    parser.add_argument("--processes", type=_counts, default=[1, 2], help="ratios are those of the largest count")
    parser.add_argument("--only", choices=PARTS, help="measure a part, and keep the others' results; no page")
    parser.add_argument("--render", action="store_true", help="write docs/benchmarks.md from the measured file")
    options = parser.parse_args()
    if options.render:
        report.write(OUT / "results.json")
        return
    results = _opened(options.only)
    started = time.perf_counter()
    for part, measure in zip(PARTS, (_tokenise, _measures, _streams, _steps), strict=True):
        if options.only in (None, part):
            shutil.rmtree(OUT / part, ignore_errors=True)
            measure(results, options)
            best = results["setup"].get("best", "").split("/")[0]
            results["measures"]["imbalance_8"] = results["measures"].get(f"imbalance_8_{best}")
            write_json(OUT / "results.json", results)
    if options.only is None:
        report.write(OUT / "results.json")
    report.show(results)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)


def _counts(text: str) -> list[int]:
    return sorted(int(count) for count in text.split(","))


def _opened(only: str | None) -> dict[str, Any]:
    """Empty results and folder, or the measured ones where only a part is measured again; and the model's folder."""
    if only is None:
        shutil.rmtree(OUT, ignore_errors=True)
    write_json(
        OUT / "model" / "config.json",
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0, **MODEL},
    )
    kept: Any = read_json(OUT / "results.json") if only else None
    results: dict[str, Any] = kept or {"ratios": {}, "measures": {}, "programs": {}, "setup": {}}
    results["setup"] |= {"batch": BATCH, "packed_batch": PACKED_BATCH, **MODEL}
    results["machine"] = {
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }
    return results


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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


def _launch(words: Sequence[str], config: RunConfig, processes: int, *more: str) -> Path:
    """Run a module on a run.json; returns its folder. processes: 0 for one process with all cores."""
    out = Path(str(config.train.output_dir))
    write_json(out / "run.json", config.to_dict())
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
    environment = {
        **os.environ,
        **({"OMP_NUM_THREADS": "1"} if processes else {}),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "true",
    }
    with (out / "log").open("w") as log:
        command = [*launcher, *words, str(out / "run.json"), *more]
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}; see {out / 'log'}")
    return out


def _steps(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Every program in alternating rounds on the largest count of processes, then once on the others."""
    *fewer, most = options.processes
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PROGRAMS}
    for number in range(1, options.rounds + 1):
        for name in PROGRAMS if number % 2 else PROGRAMS[::-1]:
            found[name].append(_program(name, number, options.steps, processes=most))
    results["programs"] = {name: {str(most): report.summary(found[name])} for name in PROGRAMS}
    for count in fewer:
        for name in PROGRAMS:
            results["programs"][name][str(count)] = report.summary([_program(name, 1, options.steps, processes=count)])
    ratios, which = step_ratios(found, OURS)
    results["ratios"] |= ratios
    results["setup"] |= {**which, "rounds": options.rounds, "steps": options.steps, "processes": options.processes}


def _program(name: str, round_number: int, steps: int, processes: int) -> dict[str, Any]:
    """One run. The round is the seed of the order, so that the intervals cover which rows are drawn."""
    out = OUT / "steps" / str(processes) / name.replace("/", "-") / f"r{round_number}"
    steps = steps_of(name, steps, processes)
    config = _config(out, steps, data__seed=round_number, **OURS.get(name, {}))
    if name in OURS:
        folder = _launch(["scaletool.train"], config, processes)
        record: Any = read_json(folder / "record.json")
        ranks = [rank["real_tokens"][WARMUP_STEPS:] for rank in record["ranks"]]
        window = {**record["window"], "imbalance": imbalance(zip(*ranks, strict=True))}
        memory = record["memory"]["peak_bytes"]
    else:
        folder = _launch(PEERS[name], config, processes)
        content: Any = read_json(folder / "window.json")
        window, memory = content["window"], content["peak_bytes"]
    speed = window["real_tokens"] / window["seconds"]
    print(f"{processes} processes, round {round_number}  {name:16} {speed:8.0f} real tokens/s", file=sys.stderr)
    return {
        "real_tokens_per_second": speed,
        "padding_share": 1 - window["real_tokens"] / window["padded_tokens"],
        "imbalance": window["imbalance"],
        "peak_bytes": memory,
        "steps": steps,
    }


def steps_of(name: str, steps: int, processes: int) -> int:
    """Measured steps of a program, where `steps` are those of stock_grouped on 2 processes."""
    if name == "stock_grouped":
        return max(1, 2 * steps // processes)
    return max(1, steps // SHORTER.get(name, 2))


def _streams(results: dict[str, Any], options: argparse.Namespace) -> None:
    speeds: dict[str, list[float]] = {"ours": [], "dispatcher": []}
    for number in range(1, options.rounds + 1):
        for name in ("ours", "dispatcher")[:: 1 if number % 2 else -1]:
            config = _config(
                OUT / "stream" / name / f"r{number}",
                STREAM_STEPS,
                model__name="tiny",
                tokenizer__kind="bytes",
                data__max_source_tokens=32,  # bytes: nearly every row is cut, so both sides train on like batches
                data__max_target_tokens=32,
                data__per_device_batch_size=4,
                data__streaming=name == "ours",
                data__num_workers=2,
            )
            content: Any = read_json(_launch(["benchmarks.stream", name], config, 2) / "window.json")
            speeds[name].append(content["window"]["samples"] / content["window"]["seconds"])
            print(f"stream, round {number}  {name:12} {speeds[name][-1]:8.1f} rows/s", file=sys.stderr)
    results["ratios"]["stream/dispatcher"] = ratio(speeds["ours"], speeds["dispatcher"]).to_dict()


def _tokenise(results: dict[str, Any], options: argparse.Namespace) -> None:
    folder = _launch(["benchmarks.tokenisation"], _config(OUT / "tokenise", 1), 0, str(max(5, options.rounds)))
    speeds: Any = read_json(folder / "speeds.json")
    results["ratios"]["tokenise/tokenizers"] = ratio(speeds["tokenise"], speeds["tokenizers"]).to_dict()


def _measures(results: dict[str, Any], options: argparse.Namespace) -> None:
    folder = _launch(["benchmarks.measures"], _config(OUT / "measures", 1), 0, str(PACKED_BATCH))
    found: Any = read_json(folder / "measures.json")
    results["measures"] |= found


if __name__ == "__main__":
    main()
