"""summary.json: medians with intervals, speedup, efficiency, missing speed, mode ratios, and sentences that say it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scaletool.errors import ConfigError
from scaletool.record import SCHEMA, read_record
from scaletool.sweep.attribution import missing_speed, wait_shares
from scaletool.sweep.run import SWEEP_FILE, read_sweep
from scaletool.sweep.stats import Estimate, estimate, measured_steps, rates, ratio

MISSING = {
    "data_wait": "waiting for data",
    "slowest_rank": "waiting for the slowest rank",
    "communication_and_other": "communication and everything else",
}
"""The parts of attribution.missing_speed, in words."""

Records = dict[int, dict[str, Any]]
"""Records of one cell by round."""


def load_records(out: Path) -> tuple[dict[str, Any], dict[str, Records]]:
    """(sweep.json, records by cell and round) of a sweep folder. Raises ConfigError where there is none."""
    sweep = read_sweep(out)
    if sweep is None:
        raise ConfigError(f"{out} holds no sweep: no readable {SWEEP_FILE}", hint="give the --out folder of a sweep")
    records: dict[str, Records] = {}
    for name in sweep["plan"]["cells"]:
        folders = [path for path in (out / "cells" / name).glob("r*") if path.name[1:].isdecimal()]
        numbered = sorted((int(path.name[1:]), path) for path in folders)
        records[name] = {number: record for number, path in numbered if (record := read_record(path))}
    return sweep, records


def summarise(sweep: Mapping[str, Any], records: Mapping[str, Records]) -> dict[str, Any]:
    """Everything that a report shows, from the records alone."""
    plan = sweep["plan"]["cells"]
    good = {name: {k: r for k, r in rounds.items() if r["outcome"] == "ok"} for name, rounds in records.items()}
    cells = {name: _cell(name, plan, records[name], good) for name in plan}
    ratios = list(_mode_ratios(plan, good))
    every = [record for rounds in records.values() for record in rounds.values()]
    stamps = sorted({record["stamp"] for record in every if record.get("stamp")})
    summary = {"schema": SCHEMA, "stamps": stamps, "cells": cells, "mode_ratios": ratios}
    return {**summary, "verdicts": list(_verdicts(summary))}


def _cell(name: str, plan: Mapping[str, Any], records: Records, good: Mapping[str, Records]) -> dict[str, Any]:
    facts = plan[name]
    outcomes = [record["outcome"] for record in records.values()]
    cell: dict[str, Any] = {
        **facts,
        "rounds_ok": len(good[name]),
        "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "reason": next((record["reason"] for record in records.values() if record["outcome"] != "ok"), None),
    }
    if not good[name]:
        return cell
    rounds = list(good[name].values())
    for key in ("samples_per_second", "real_tokens_per_second", "padded_tokens_per_second"):
        cell[key] = estimate([rates(record)[key] for record in rounds]).to_dict()
    steps = [step for record in rounds for step in measured_steps(record)]
    cell |= {
        "step_seconds_median": statistics.median(step["seconds"] for step in steps),
        "peak_memory_bytes": max(record["memory"]["peak_bytes"] for record in rounds),
        "skipped_steps": sum(bool(step["skipped"]) for step in steps),
        "shares": wait_shares(rounds),
        "loss_last": rounds[-1]["steps"][-1]["loss"],
    }
    baseline = _baseline(name, plan, good)
    if baseline and not facts["oversubscribed"]:
        # Real tokens, not samples: batches of other counts hold other rows, and ragged rows are unlike work.
        speedup = _paired(good[name], good[baseline], "real_tokens_per_second")
        if speedup:
            efficiency = speedup.scaled(plan[baseline]["gpus"] / facts["gpus"])
            parts = missing_speed(rounds, list(good[baseline].values()), efficiency.median)
            cell |= {
                "baseline": baseline,
                "speedup": speedup.to_dict(),
                "efficiency": efficiency.to_dict(),
                "missing": parts,
            }
    return cell


def _baseline(name: str, plan: Mapping[str, Any], good: Mapping[str, Records]) -> str | None:
    """The cell of the smallest count with the same profile, mode and scaling that was measured fairly."""
    same = [
        other
        for other, facts in plan.items()
        if good[other]
        and not facts["oversubscribed"]
        and all(facts[key] == plan[name][key] for key in ("profile", "mode", "scaling"))
    ]
    return min(same, key=lambda other: plan[other]["gpus"], default=None)


def _paired(above: Records, below: Records, key: str) -> Estimate | None:
    common = sorted(above.keys() & below.keys())
    if not common:
        return None
    return ratio([rates(above[k])[key] for k in common], [rates(below[k])[key] for k in common])


def _mode_ratios(plan: Mapping[str, Any], good: Mapping[str, Records]) -> Iterable[dict[str, Any]]:
    for name, facts in plan.items():
        if facts["mode"] != "trainer":
            continue
        custom = next((o for o, f in plan.items() if f == {**facts, "mode": "custom"}), None)
        if custom and (found := _paired(good[name], good[custom], "real_tokens_per_second")):
            keys = ("profile", "gpus", "scaling", "oversubscribed")
            yield {**{key: facts[key] for key in keys}, "trainer/custom": found.to_dict()}


def _verdicts(summary: Mapping[str, Any]) -> Iterable[str]:
    for name, cell in summary["cells"].items():
        bad = {outcome: count for outcome, count in cell["outcomes"].items() if outcome != "ok"}
        if bad:
            counts = ", ".join(f"{count}x {outcome}" for outcome, count in bad.items())
            yield f"{name}: {counts}. {str(cell['reason']).splitlines()[0]}"
        elif not cell["outcomes"]:
            yield f"{name}: not measured yet."
    for name, cell in summary["cells"].items():
        if "speedup" in cell and cell["baseline"] != name:
            first = summary["cells"][cell["baseline"]]["gpus"]
            gain = Estimate(**cell["speedup"])
            label = f"{first} -> {cell['gpus']} processes, {cell['profile']} {cell['mode']}, {cell['scaling']} scaling"
            efficiency = f"efficiency {cell['efficiency']['median']:.0%}{_missing(cell)}"
            yield f"{label}: {_change(gain, 'faster', 'slower')}, {efficiency}."
    for entry in summary["mode_ratios"]:
        label = f"trainer against custom, {entry['profile']} on {entry['gpus']} ({entry['scaling']})"
        yield f"{label}: {_change(Estimate(**entry['trainer/custom']), 'faster', 'slower')}."
    if max(cell["rounds_ok"] for cell in summary["cells"].values()) == 1:
        yield "Only one round: figures have no interval and no difference can be shown; --rounds 3 gives both."
    if any(cell["oversubscribed"] for cell in summary["cells"].values()):
        yield "oversubscribed cells share cores between processes; they are left out of speedup and efficiency."


def _missing(cell: Mapping[str, Any]) -> str:
    """Where the missing speed went, largest part first, unless none can be shown to be missing."""
    high = cell["efficiency"]["high"] or cell["efficiency"]["median"]
    parts = sorted(cell["missing"].items(), key=lambda part: -part[1])
    texts = [f"{MISSING[name]} {share:.0%}" for name, share in parts if share >= 0.005]
    return f"; missing: {', '.join(texts)}" if high < 1 and texts else ""


def _change(found: Estimate, more: str, less: str) -> str:
    """A ratio in words; an interval that holds 1 is no difference."""
    percent = f"{abs(found.median - 1):.1%} {more if found.median >= 1 else less}"
    if found.low is None or found.high is None:
        return f"{percent} (one round)"
    span = f"[{found.low - 1:+.1%}, {found.high - 1:+.1%}]"
    return f"{percent} {span}" if found.differs_from_one else f"no difference can be shown {span}"
