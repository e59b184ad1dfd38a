"""The same results as a terminal table, report.md, report.html, results.csv and scaling.png."""

from __future__ import annotations

import base64
import csv
import html
import io
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletool.record import shown, write_json
from scaletool.sweep.stats import measured_steps, rates
from scaletool.sweep.summary import Records, load_records, summarise

FORMATS = ("html", "md", "csv", "png")
HEADINGS = ("gpus", "profile", "mode", "scaling", "samples/s", "real tok/s", "speedup", "eff.", "data", "note")
RATIO_HEADINGS = ("gpus", "profile", "scaling", "trainer/custom", "note")
WRAPPING = ("samples/s", "real tok/s", "speedup", "trainer/custom", "note")
WIDE = 100
"""Columns of a terminal that hold the whole table, and of the text where stdout is none."""
CSV_COLUMNS = (
    *("cell", "round", "gpus", "profile", "mode", "scaling", "outcome", "step_seconds_median", "samples_per_second"),
    *("real_tokens_per_second", "padded_tokens_per_second", "data_wait_share", "peak_memory_bytes", "skipped_steps"),
    *("loss_last", "oversubscribed", "stamp"),
)


def write_reports(out: Path, formats: Sequence[str] = ("csv", "md")) -> dict[str, Any]:
    """Rebuild summary.json and the given formats from the records of a sweep folder; returns the summary."""
    sweep, records = load_records(out)
    summary = summarise(sweep, records)
    write_json(out / "summary.json", summary)
    if "csv" in formats:
        _write(out / "results.csv", _csv(sweep, records))
    if "md" in formats:
        _write(out / "report.md", markdown(sweep, summary))
    if "png" in formats or "html" in formats:
        picture = scaling_picture(summary)
        if "png" in formats:
            _write(out / "scaling.png", picture)
        if "html" in formats:
            _write(out / "report.html", page(sweep, summary, picture))
    return summary


def print_table(summary: Mapping[str, Any], title: str) -> None:
    """The closing table and the verdicts, on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for name, headings, rows in tables(summary, title):
        shown_columns = [at for at, heading in enumerate(headings) if heading != "data" or console.width >= WIDE]
        table = Table(box=None, pad_edge=False, title=name, title_justify="left", title_style="bold")
        for heading in (headings[at] for at in shown_columns):
            # Where the terminal is narrow an interval goes below its figure: no figure is cut off.
            left, wraps = heading in ("profile", "mode", "scaling", "note"), heading in WRAPPING
            table.add_column(heading, justify="left" if left else "right", no_wrap=not wraps)
        for row in rows:
            table.add_row(*(row[at] for at in shown_columns))
        console.print(table, "")
    for line in [*summary["verdicts"], *summary["stamps"]]:
        console.print(f"- {line}", markup=False, soft_wrap=True)


def tables(summary: Mapping[str, Any], title: str) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """(title, headings, rows) of every table of a report."""
    found: list[tuple[str, Sequence[str], list[list[str]]]] = [(title, HEADINGS, table_rows(summary))]
    ratios = []
    for entry in summary["mode_ratios"]:
        note = "oversubscribed" if entry["oversubscribed"] else ""
        ratio = _interval(entry["trainer/custom"], "{:.3f}")
        ratios.append([str(entry["gpus"]), entry["profile"], entry["scaling"], ratio, note])
    if ratios:
        found.append(("Trainer against custom, in real tokens/s", RATIO_HEADINGS, ratios))
    return found


def table_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """One row of texts per cell, in the order of HEADINGS."""
    rows = []
    for cell in summary["cells"].values():
        bad = [f"{count}x {outcome}" for outcome, count in cell["outcomes"].items() if outcome != "ok"]
        skipped = [f"{cell['skipped_steps']} skipped steps"] if cell.get("skipped_steps") else []
        notes = [*bad, *skipped, *(["oversubscribed"] if cell["oversubscribed"] else [])]
        figures = [_figure(cell.get(f"{what}_per_second")) for what in ("samples", "real_tokens")]
        speedup, efficiency = cell.get("speedup"), cell.get("efficiency")
        figures += [_interval(speedup, "{:.2f}"), _interval(efficiency and {**efficiency, "low": None}, "{:.0%}")]
        wait = f"{cell['shares']['data_wait']:.1%}" if "shares" in cell else "-"
        facts = [str(cell["gpus"]), cell["profile"], cell["mode"], cell["scaling"]]
        rows.append([*facts, *figures, wait, ", ".join(notes)])
    return rows


def markdown(sweep: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    lines = ["# Scaling sweep", "", _subtitle(sweep), ""]
    for title, headings, rows in tables(summary, "Cells"):
        table = [list(headings), ["---"] * len(headings), *rows]
        lines += [f"## {title}", "", *("| " + " | ".join(row) + " |" for row in table), ""]
    return "\n".join([*lines, *(f"- {line}" for line in [*summary["verdicts"], *summary["stamps"]])]) + "\n"


def page(sweep: Mapping[str, Any], summary: Mapping[str, Any], picture: bytes) -> str:
    """One self-contained HTML file; every text is escaped."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row) + "</tr>"

    shown_tables = "".join(
        f"<h2>{html.escape(title)}</h2><div><table>{cells(headings, 'th')}{''.join(cells(row, 'td') for row in rows)}"
        "</table></div>"
        for title, headings, rows in tables(summary, "Cells")
    )
    verdicts = "".join(f"<li>{html.escape(line)}</li>" for line in [*summary["verdicts"], *summary["stamps"]])
    image = base64.b64encode(picture).decode()
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Scaling sweep</title>'
        '<meta name="viewport" content="width=device-width"><style>:root{color-scheme:light dark}'
        "body{font:16px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}table{border-collapse:collapse}"
        "td,th{padding:.3em .8em;border-bottom:1px solid #8888;text-align:right;white-space:nowrap}"
        "div{overflow-x:auto}img{max-width:100%;background:#fff}</style>"
        f"<h1>Scaling sweep</h1><p>{html.escape(_subtitle(sweep))}</p>{shown_tables}"
        f'<ul>{verdicts}</ul><img alt="throughput against processes" src="data:image/png;base64,{image}"></html>\n'
    )


def scaling_picture(summary: Mapping[str, Any]) -> bytes:
    """PNG: real tokens per second against processes, with error bars; a line per profile, mode and scaling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    series: dict[str, list[Mapping[str, Any]]] = {}
    for cell in summary["cells"].values():
        if "real_tokens_per_second" in cell:
            series.setdefault(f"{cell['profile']} {cell['mode']} ({cell['scaling']})", []).append(cell)
    for label, points in series.items():
        points.sort(key=lambda cell: cell["gpus"])
        counts = [cell["gpus"] for cell in points]
        speeds = [cell["real_tokens_per_second"] for cell in points]
        middle = [speed["median"] for speed in speeds]
        below = [speed["median"] - (speed["low"] or speed["median"]) for speed in speeds]
        above = [(speed["high"] or speed["median"]) - speed["median"] for speed in speeds]
        line = axes.errorbar(counts, middle, yerr=[below, above], marker="o", capsize=4, label=label)
        if len(counts) > 1:
            ideal = [middle[0] * count / counts[0] for count in counts]
            axes.plot(counts, ideal, linestyle=":", color=line[0].get_color(), alpha=0.6)
        shared = [(c, m) for c, m, p in zip(counts, middle, points, strict=True) if p["oversubscribed"]]
        axes.plot(*zip(*shared, strict=True), "kx", markersize=10) if shared else None
    axes.set(xlabel="processes", ylabel="real tokens per second", ylim=(0, None))
    axes.set_title("dotted: ideal, x: oversubscribed")
    axes.set_xticks(sorted({cell["gpus"] for cell in summary["cells"].values()}))
    if series:
        axes.legend(fontsize="small")
    if summary["stamps"]:
        figure.text(0.99, 0.01, summary["stamps"][0], ha="right", fontsize="x-small", alpha=0.7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    return buffer.getvalue()


def _csv(sweep: Mapping[str, Any], records: Mapping[str, Records]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, CSV_COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for name, facts in sweep["plan"]["cells"].items():
        for number, record in records[name].items():
            stamp = record.get("stamp") or ""
            row = {"cell": name, "round": number, **facts, "outcome": record["outcome"], "stamp": stamp}
            writer.writerow({**row, **(_measured(record) if record["outcome"] == "ok" else {})})
    return buffer.getvalue()


def _measured(record: Mapping[str, Any]) -> dict[str, Any]:
    steps = measured_steps(record)
    seconds = sum(step["seconds"] for step in steps)
    return {
        **{key: f"{value:.4f}" for key, value in rates(record).items()},
        "step_seconds_median": f"{statistics.median(step['seconds'] for step in steps):.6f}",
        "data_wait_share": f"{sum(step['data_wait_seconds'] for step in steps) / seconds:.4f}",
        "peak_memory_bytes": record["memory"]["peak_bytes"],
        "skipped_steps": sum(bool(step["skipped"]) for step in steps),
        "loss_last": shown(record["steps"][-1]["loss"], ".6f"),
    }


def _figure(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    text = f"{found['median']:.1f}" if found["median"] < 1000 else f"{found['median']:,.0f}"
    if found["low"] is None:
        return text
    return f"{text} ±{(found['high'] - found['low']) / 2 / found['median']:.1%}"


def _interval(found: Mapping[str, Any] | None, form: str) -> str:
    if found is None:
        return "-"
    if found["low"] is None or found["low"] == found["high"]:
        return form.format(found["median"])
    return f"{form.format(found['median'])} [{form.format(found['low'])}, {form.format(found['high'])}]"


def _subtitle(sweep: Mapping[str, Any]) -> str:
    config, machine = sweep["plan"]["config"], sweep["machine"]
    where = ", ".join(machine["gpus"]) or f"{machine['cpu_count']} CPU cores"
    measure = config["measure"]
    rounds = f"{measure['rounds']} round{'s' if measure['rounds'] > 1 else ''}"
    return (
        f"{config['model']['name']}, {config['data']['batching']} batches, {rounds} of"
        f" {measure['steps']} steps after {measure['warmup_steps']} of warm-up, started {sweep['started']}, on {where}"
    )


def _write(path: Path, content: str | bytes) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(scratch, path)
