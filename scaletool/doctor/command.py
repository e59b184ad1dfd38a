"""`scaletool doctor`: read, check, report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from scaletool.config import load_config
from scaletool.doctor import rules as _rules  # noqa: F401 - registers them
from scaletool.doctor.documents import Document, read
from scaletool.doctor.explain import Setting, shown
from scaletool.doctor.registry import GPUS, SEVERITIES, Context, Finding, check, sorted_findings
from scaletool.doctor.run_config import check_run
from scaletool.errors import ConfigError

FACTS = {
    "batches_per_process": "batches that one process reads in an epoch: len of its prepared loader, or as its log says",
    "rows": "examples of the training data",
    "world_size": "processes of the run, over all nodes",
    "source_tokens": "tokens of a typical source",
}
"""What only the user can know, by name."""


def examine(paths: Sequence[str], context: Context) -> tuple[list[Document], list[Finding]]:
    """The documents behind `paths`, checked together, and what the rules find in them."""
    documents = [read(path) for path in dict.fromkeys(paths)]
    return documents, findings_of(documents, context)


def findings_of(documents: Sequence[Document], context: Context) -> list[Finding]:
    """What the rules over files and those over run configs find."""
    own = [finding for document in documents if document.kind == "run" for finding in _run_findings(document)]
    return sorted_findings([*check(documents, context), *own], documents)


def refuse_launch(files: Sequence[str], gpu_name: str | None, **launched: Any) -> None:
    """Raise one ConfigError with every error finding in the files of a launch.

    files: the accelerate config and the DeepSpeed JSON it names. gpu_name: as the driver reports it; None on a machine
    without GPUs, where nothing is said of them. launched: keys of the config that the launch line replaces.
    """
    known = {"V100": "v100-32gb", "T4": "t4-16gb"}
    target = next((name for part, name in known.items() if gpu_name and part in gpu_name), "h200-141gb")
    documents = [read(path) for path in files]
    documents[0].data.update(launched)
    errors = [each for each in findings_of(documents, Context(gpu=GPUS[target])) if each.severity == "error"]
    if errors:
        raise ConfigError(
            "\n".join(
                str(ConfigError(each.message, where=f"{each.file}:{each.line} ({each.key})", hint=each.fix))
                for each in errors
            )
        )


def _run_findings(document: Document) -> list[Finding]:
    try:
        loaded = load_config(document.path)
    except ConfigError as error:
        place = (error.where or "").split(" ")[0].rpartition(":")[2]
        line = int(place) if place.isdecimal() else None
        fix = error.hint or "mend it"
        return [Finding("run-config", "error", document.path, None, line, error.message, fix)]
    return [
        Finding(each.rule, each.severity, document.path, each.key, document.line(each.key), each.message, each.fix)
        for each in check_run(loaded)
    ]


def context_of(gpu: str, settings: Sequence[str]) -> Context:
    """The target and the facts of a command line. Raises ConfigError for an unknown GPU or a setting that is no fact.

    settings: "facts.name=value".
    """
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is not known", hint="known: " + ", ".join(GPUS))
    facts: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        section, _, name = key.strip().partition(".")
        if not separator or section != "facts" or name not in FACTS:
            known = ", ".join(f"facts.{fact}=N" for fact in FACTS)
            raise ConfigError(f"--set {setting} is not a fact", hint=f"known: {known}")
        text = text.strip().replace(",", "").replace("_", "")
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"--set {setting}: not a whole number above 0", hint=f"give the {FACTS[name]}")
        facts[name] = int(text)
    return Context(gpu=GPUS[gpu], facts=facts)


def as_json(findings: Sequence[Finding], settings: Sequence[Setting] | None = None) -> str:
    """The form of DESIGN section 5; with --explain also the settings."""
    content: dict[str, Any] = {"findings": [finding.to_dict() for finding in findings], "summary": counts(findings)}
    if settings is not None:
        content["settings"] = [setting.to_dict() for setting in settings]
    return json.dumps(content, indent=2, default=str)


def counts(findings: Sequence[Finding]) -> Mapping[str, int]:
    return {severity: sum(each.severity == severity for each in findings) for severity in SEVERITIES}


def as_text(findings: Sequence[Finding], documents: Sequence[Document]) -> str:
    """What a person reads: per finding the place, the message and the fix; at the end what was looked at."""
    lines = []
    for each in findings:
        place = ":".join(str(part) for part in (each.file, each.line) if part)
        key = f" ({each.key})" if each.key and each.key not in each.message else ""
        lines.append(f"{each.severity}: {place}{key}: {each.message}")
        lines.append(f"  fix: {each.fix}")
        lines.append(f"  rule: {each.rule}" + (f" · evidence: {each.link}" if each.link else ""))
    found = counts(findings)
    summary = ", ".join(f"{number} {name}{'s' * (number != 1)}" for name, number in found.items() if number)
    kinds = ", ".join(f"{document.path} ({document.kind})" for document in documents)
    return "\n".join([*lines, f"{summary or 'nothing found'} in {kinds}"])


def explain_text(settings: Sequence[Setting]) -> str:
    """A table: setting, value, source, and what lost."""
    rows = [
        (each.name, shown(each.value), each.place, "; ".join(map(str, each.lost)))
        for each in settings
        if each.sources or each.name in ("world_size", "distributed_type")
    ]
    widths = [max(len(row[column]) for row in [*rows, HEAD]) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in (HEAD, *rows)
    )


HEAD = ("setting", "value", "comes from", "lost")
