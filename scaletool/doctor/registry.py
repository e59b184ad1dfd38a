"""What a rule is: one function over one document, with an example that it refuses and one that it lets pass.

Adding a rule means adding such a function in `rules/`. A test runs every example, and docs/rules.md is generated from
what stands here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from scaletool.doctor.documents import Document, Kind

Severity = Literal["error", "warning", "info"]
"""error: it will fail, or silently do something else than written. warning: it costs speed or safety. info: worth
knowing."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

Example = str | Mapping[str, str]
"""A file's text, or the texts of several files by name."""


class Edit(NamedTuple):
    """A mechanical correction: the value of a dotted key, set, deleted or moved to another key."""

    action: Literal["set", "delete", "rename"]
    key: str
    value: Any = None


class Problem(NamedTuple):
    """What a rule found. at: the dotted key, or the line number, or None for the whole file. severity: where it is
    not the rule's own."""

    at: str | int | None
    message: str
    fix: str
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None


@dataclass(frozen=True)
class Finding:
    """A problem with its rule and place, as printed and as `--json` writes it."""

    rule: str
    severity: Severity
    file: str | None
    key: str | None
    line: int | None
    message: str
    fix: str
    link: str | None = None
    edits: tuple[Edit, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The keys of DESIGN: rule, severity, file, key, line, message, fix, link."""
        return {key.name: getattr(self, key.name) for key in dataclasses.fields(self) if key.name != "edits"}


@dataclass(frozen=True)
class Gpu:
    """The GPU a run is meant for. capability: compute capability. memory: GiB."""

    name: str
    capability: tuple[int, int]
    memory: int

    @property
    def has_bf16(self) -> bool:
        """Ampere and later have bf16 units; before, libraries emulate them without a word."""
        return self.capability >= (8, 0)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100-16gb", (7, 0), 16),
        Gpu("v100-32gb", (7, 0), 32),
        Gpu("t4-16gb", (7, 5), 16),
        Gpu("a100-40gb", (8, 0), 40),
        Gpu("a100-80gb", (8, 0), 80),
        Gpu("h100-80gb", (9, 0), 80),
        Gpu("h200-141gb", (9, 0), 141),
    )
}


@dataclass(frozen=True)
class Context:
    """What a rule may know beside its own document.

    facts: what only the user knows, by name: batches_per_process, rows, world_size ... counts: GPU counts the run is
    meant for. documents: all that were given in the same call.
    """

    gpu: Gpu = GPUS["v100-32gb"]
    counts: tuple[int, ...] = (1, 2, 4, 8)
    facts: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Document] = ()

    def of(self, kind: Kind) -> list[Document]:
        """The documents of a kind."""
        return [document for document in self.documents if document.kind == kind]


Check = Callable[[Document, Context], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """A check over the documents of some kinds. link: the thread or page that shows it, as owner/name#number or
    words."""

    name: str
    severity: Severity
    kinds: tuple[Kind, ...]
    check: Check
    bad: Example
    good: Example
    link: str | None

    @property
    def why(self) -> str:
        """The function's docstring: what happens, and to whom."""
        return " ".join((self.check.__doc__ or "").split())


RULES: dict[str, Rule] = {}
"""Every rule by name, in the order they run."""


def rule(
    name: str, severity: Severity, *kinds: Kind, bad: Example, good: Example, link: str | None = None
) -> Callable[[Check], Check]:
    """Register a function that yields the problems of a document of one of `kinds`."""

    def register(check: Check) -> Check:
        assert name not in RULES, name
        RULES[name] = Rule(name, severity, kinds, check, bad, good, link)
        return check

    return register


def check(documents: Sequence[Document], context: Context) -> list[Finding]:
    """The findings of all rules over all documents."""
    context = dataclasses.replace(context, documents=documents)
    found: list[Finding] = []
    for document in documents:
        for fault in document.faults:
            found.append(_finding(document, fault.rule, "error", Problem(fault.at, fault.message, fault.fix)))
        for each in RULES.values():
            if document.kind in each.kinds:
                for problem in each.check(document, context):
                    found.append(_finding(document, each.name, each.severity, problem, each.link))
    return found


def sorted_findings(findings: Sequence[Finding], documents: Sequence[Document]) -> list[Finding]:
    """By document, in each the graver first, then by line."""
    order = {document.path: number for number, document in enumerate(documents)}
    return sorted(
        findings, key=lambda each: (order.get(each.file or "", 0), SEVERITIES.index(each.severity), each.line or 0)
    )


def _finding(document: Document, name: str, severity: Severity, problem: Problem, link: str | None = None) -> Finding:
    key = problem.at if isinstance(problem.at, str) else None
    line = problem.at if isinstance(problem.at, int) else document.line(key) if key else None
    return Finding(
        name, problem.severity or severity, document.path, key, line, problem.message, problem.fix, link, problem.edits
    )
