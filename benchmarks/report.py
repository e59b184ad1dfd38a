"""The benchmark's results as text and as docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletool.record import read_json
from scaletool.sweep.stats import estimate

PAGE = Path("docs/benchmarks.md")
HEADINGS = (
    "program",
    "processes",
    "steps",
    "real tokens/s",
    "padding share",
    "busiest / mean rank",
    "peak memory per process",
)
MEANING = {
    "thread_custom": "the forum thread's loop as posted: dispatched stream, all padded to 512, metrics every step",
    "thread_trainer": "the thread's Trainer as posted, on the same stream",
    "stock_dynamic": "Seq2SeqTrainer, random order, padded to the longest",
    "stock_grouped": "Seq2SeqTrainer, length-grouped sampling",
    "bare": "a hand-written DDP loop on scaletool's bucketed batches",
    "padded": "scaletool, random order, in both modes",
    "bucketed": "scaletool, like lengths together",
    "packed": "scaletool, packed rows",
}


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over rounds: speed with its interval, medians of the rest."""
    found: dict[str, Any] = {
        "real_tokens_per_second": estimate([run["real_tokens_per_second"] for run in runs]).to_dict()
    }
    for key in ("padding_share", "imbalance", "peak_bytes"):
        values = [run[key] for run in runs if run[key] is not None]
        found[key] = statistics.median(values) if values else None
    return found | {"steps": runs[0].get("steps")}


def show(results: dict[str, Any]) -> None:
    """The figures on stdout."""
    print("\n".join([*_programs(results), "", *_ratios(results), "", *_measures(results)]))


def write(path: Path) -> None:
    """docs/benchmarks.md from a results.json."""
    results: Any = read_json(path)
    setup = results["setup"]
    text = f"""# Benchmarks

Written by `make bench` from its results; do not edit.

{_setup(setup)}

{_machine(results["machine"])}

## Programs

{chr(10).join(_programs(results))}

{chr(10).join(f"- {name}: {meaning}" for name, meaning in MEANING.items())}

What was left as posted, and what had to change, stands at the head of each file in `benchmarks/`.

## Ratios

`best` is {setup["best"]}; `thread` is {setup["thread"]}, the faster of the thread's two.

{chr(10).join(_ratios(results))}

`trainer/custom` is taken at the batching of `best`, `custom/bare` on identical batches. `tokenise/tokenizers`: files to
Arrow on disk, against the tokenizers library alone on texts in memory, all cores. `stream/dispatcher`: rows that cost
10 ms each, 2 processes, 2 workers each, against accelerate's default dispatcher, which reads all rows in one process.

## Measures

{chr(10).join(_measures(results))}

Padding shares are those of the data over an epoch's first 256 steps. `imbalance_8`: real tokens of the busiest of 8
ranks / of the mean rank, at the batching of `best`. `order_start`: the first batch of one of 4,096 ranks out of 100
million rows, at a start or at a resume, worst of several places.
"""
    PAGE.write_text(text, encoding="utf-8")


def _setup(setup: dict[str, Any]) -> str:
    layers = setup["num_layers"]
    return f"""\
All programs train the same T5 ({layers}+{layers} layers of width {setup["d_model"]}, vocabulary \
{setup["vocab_size"]}, no dropout) in float32 with AdamW on the same
rows: functions and docstrings of the Python standard library, tokenised ahead, cut at 512 and 128 tokens.
{setup["batch"]} examples per process and step, or {setup["packed_batch"]} packed rows of 512. Speed is real tokens \
(source and target, no padding) per second of the
steps after warm-up, end to end, the slowest rank's. Every round draws other rows, for scaletool and the bare loop the
same. {setup["rounds"]} rounds in alternation on the largest number of processes, one on the others; intervals are \
95%, over rounds.
Memory is the largest resident size of a process, libraries included."""


def _machine(machine: dict[str, Any]) -> str:
    named = ("processor", "cpu_count")
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in named)
    return f"""\
Measured on {machine["cpu_count"]} CPU cores ({machine["processor"]}) over gloo, one thread per process\
{f"; {versions}" if versions else ""}.
That compares programs on one machine. It says nothing about the speed of GPUs, where kernels, memory and links differ,
and where the host has other work to hide: neither these speeds nor these ratios carry over to them."""


def _programs(results: dict[str, Any]) -> list[str]:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for name, by_count in results["programs"].items():
        for count, found in sorted(by_count.items()):
            speed = found["real_tokens_per_second"]
            span = f" [{speed['low']:,.0f}, {speed['high']:,.0f}]" if speed["low"] is not None else ""
            imbalance = f"{found['imbalance']:.3f}" if found["imbalance"] is not None else "-"
            cells = (
                name,
                count,
                f"{found.get('steps') or '-'}",
                f"{speed['median']:,.0f}{span}",
                f"{found['padding_share']:.1%}",
                imbalance,
            )
            lines.append(f"| {' | '.join(cells)} | {found['peak_bytes'] / 2**20:,.0f} MiB |")
    return lines


def _ratios(results: dict[str, Any]) -> list[str]:
    lines = ["| ratio | median | 95% interval | rounds |", "|---|---|---|---|"]
    for name, found in results["ratios"].items():
        span = "-" if found["low"] is None else f"{found['low']:.3f} to {found['high']:.3f}"
        lines.append(f"| {name} | {found['median']:.3f} | {span} | {found['rounds']} |")
    return lines


def _measures(results: dict[str, Any]) -> list[str]:
    lines = ["| measure | value |", "|---|---|"]
    return lines + [f"| {name} | {value:.4g} |" for name, value in results["measures"].items() if value is not None]
