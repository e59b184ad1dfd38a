"""docs/rules.md, generated from the rules: `python -m scaletool.doctor.catalogue` writes it."""

from __future__ import annotations

import difflib
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
    yield f"Generated from {len(RULES) + len(RUN_RULES)} rules. Each has an example that it refuses and one in which"
    yield "nothing is found; shown is the way from the first to the second. An error will fail, or silently do what is"
    yield "not written; a warning costs speed or safety; an info is worth knowing."
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
    yield from ("```diff", *_change(_files(rule.bad), _files(rule.good)), "```", "")


def _files(example: Example) -> dict[str, str]:
    return {"": example} if isinstance(example, str) else dict(example)


def _change(bad: dict[str, str], good: dict[str, str]) -> Iterator[str]:
    """What to change in the refused example to make the accepted one."""
    for name in dict.fromkeys([*bad, *good]):
        old, new = (files.get(name, "").replace("\r", "␍").split("\n") for files in (bad, good))
        lines = list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]
        if lines and name:
            yield f"# {name}"
        yield from ("..." if line.startswith("@@") else line for line in lines)


if __name__ == "__main__":
    PAGE.write_text(catalogue(), encoding="utf-8")
