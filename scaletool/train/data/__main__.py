"""`scaletool data inspect` and `scaletool data prepare`, in a process of their own: the command line loads no torch."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from scaletool.config import LoadedConfig, load_config
from scaletool.doctor.run_config import refuse_errors
from scaletool.errors import ScaletoolError


def main() -> int:
    parser = argparse.ArgumentParser(prog="scaletool data", allow_abbrev=False)
    parser.add_argument("command", choices=["inspect", "prepare"])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "inspect" and not arguments.files:
        parser.error("inspect needs files")
    try:
        if arguments.command == "prepare":
            return _prepare(_load(arguments.files[0] if arguments.files else None, arguments.set))
        return _inspect(arguments)
    except ScaletoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def _load(run_file: str | None, overrides: list[str]) -> LoadedConfig:
    loaded = load_config(run_file, overrides)
    refuse_errors(loaded)
    return loaded


def _inspect(arguments: argparse.Namespace) -> int:
    from scaletool.train.data.inspect import inspect
    from scaletool.train.data.tokenizer import load_tokenizer
    from scaletool.train.world import cache_folder

    run_files = [name for name in arguments.files if name.endswith((".yaml", ".yml"))]
    config = _load(run_files[0] if run_files else None, arguments.set).run
    patterns = [name for name in arguments.files if name not in run_files]
    if run_files:
        validation = config.data.validation
        patterns += [*config.data.train, *(validation if isinstance(validation, list) else [])]
    with tempfile.TemporaryDirectory() as scratch:
        cache = cache_folder(config) if config.tokenizer.kind == "train" else Path(scratch)
        cache.mkdir(parents=True, exist_ok=True)
        report = inspect(patterns, config, load_tokenizer(config, cache))
    print(json.dumps(report, indent=1) if arguments.json else "\n".join(_lines(report)))
    return 2 if any(finding["severity"] == "error" for finding in report["findings"]) else 0


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{entry['file']}: {entry['rows']} rows" for entry in report["files"]]
    if len(lines) > 1:
        lines.append(f"together: {report['rows']} rows")
    for side, facts in report.get("tokens", {}).items():
        lines.append(
            f"{side} tokens: median {facts['p50']}, p90 {facts['p90']}, p99 {facts['p99']}, longest {facts['max']};"
            f" {facts['cut_share']:.1%} above the limit {facts['limit']}; {facts['suggested_limit']} would do"
        )
    if "padding_share" in report:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in report["padding_share"].items())
        lines.append(f"padding share by data.batching: {shares}")
    for finding in report["findings"]:
        word = "note" if finding["severity"] == "info" else finding["severity"]
        lines.append(f"{word}: {finding['message']}")
        lines += [f"  hint: {finding['fix']}"] if finding["fix"] else []
    return lines


def _prepare(loaded: LoadedConfig) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from scaletool.train.data.shards import load_shards
    from scaletool.train.data.tokenizer import load_tokenizer
    from scaletool.train.world import cache_folder

    config = loaded.run
    cache = cache_folder(config)
    cache.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("rows tokenised", total=None, visible=not config.data.streaming)
        shards = load_shards(
            config,
            cache,
            load_tokenizer(config, cache),
            rank=0,
            world_size=1,
            progress=lambda done, rows: bar.update(task, completed=done, total=rows),
        )
    for note in shards.notes:
        print(note)
    print(f"{shards.plan.rows} rows are ready in {cache}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
