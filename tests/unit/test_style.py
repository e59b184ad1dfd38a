"""House rules that no linter knows: short functions, and upstream names that belong to one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "scaletool"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FUNCTION = 60

OWNERS = {
    "per_device_train_batch_size": "train/trainer_mode.py",
    "train_micro_batch_size_per_gpu": "profiles.py",
}
"""Upstream names of the micro-batch and the one file that may say them; elsewhere it is per_device_batch_size."""


def test_functions_are_short() -> None:
    too_long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name} has {length} lines"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert not too_long, f"longer than {LONGEST_FUNCTION} lines:\n" + "\n".join(too_long)


@pytest.mark.parametrize(("name", "owner"), OWNERS.items())
def test_upstream_name_has_one_owner(name: str, owner: str) -> None:
    users = {path.relative_to(PACKAGE).as_posix() for path in SOURCES if name in path.read_text(encoding="utf-8")}
    users = {user for user in users if not user.startswith("doctor/")}  # whose business is what users write
    assert users <= {owner}, f"{name} belongs to {owner}; write per_device_batch_size in the others"
