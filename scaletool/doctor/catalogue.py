"""docs/rules.md, generated from the rules: `python -m scaletool.doctor.catalogue` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scaletool.doctor import rules as _rules  # noqa: F401 - registers them
from scaletool.doctor.registry import RULES, Example, Rule
from scaletool.doctor.run_config import RULES as RUN_RULES

TITLES = {
    "accelerate": "accelerate configs",
    "deepspeed": "DeepSpeed configs",
    "arguments": "Training arguments",
    "model": "T5 configs",
    "run": "Run configs, by target",
    "script": "Training scripts",
    "sbatch": "Job scripts",
    "environment": "This machine",
}
PAGE = Path("docs/rules.md")


def catalogue() -> str:
    """The page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield "# What `scaletool doctor` looks for"
    yield ""
    yield f"Generated from {len(RULES) + len(RUN_RULES)} rules, each a function with an example that it refuses and one"
    yield "in which nothing is found. An error will fail, or silently do something else than written; a warning costs"
    yield "speed or safety."
    for kind, title in TITLES.items():
        yield from ("", f"## {title}", "")
        for rule in RULES.values():
            if rule.kinds[0] == kind:
                yield from _entry(rule)
    yield from ("", "## Run configs", "", "Values that no run can use, each with its limits in the message:", "")
    yield ", ".join(f"`{name}`" for name in RUN_RULES) + "."


def _entry(rule: Rule) -> Iterator[str]:
    evidence = f" Evidence: {rule.link}." if rule.link else ""
    yield from (f"### {rule.name} ({rule.severity})", "", f"{rule.why}{evidence}", "")
    yield from ("<details><summary>refused, and let pass</summary>", "")
    for example in (rule.bad, rule.good):
        yield from _blocks(example)
    yield from ("</details>", "")


def _blocks(example: Example) -> Iterator[str]:
    for text in [example] if isinstance(example, str) else example.values():
        yield from ("````", text.rstrip("\n"), "````", "")


if __name__ == "__main__":
    PAGE.write_text(catalogue(), encoding="utf-8")
