"""Every rule has an example that it refuses and one in which nothing is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletool.doctor.command import examine
from scaletool.doctor.registry import RULES, Context, Example


def written(folder: Path, example: Example) -> list[str]:
    """Paths of an example's files, under names without a telling suffix where it gives none."""
    files = {"example": example} if isinstance(example, str) else example
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)


@pytest.mark.parametrize("name", RULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rule = RULES[name]
    found = examine(written(tmp_path, rule.bad), Context())[1]
    assert name in {each.rule for each in found}
    mine = [each for each in found if each.rule == name]
    assert all(each.message and each.fix and each.file for each in mine)
    for each in examine(written(tmp_path, rule.good), Context())[1]:
        pytest.fail(f"found in the good example: {each}")


@pytest.mark.parametrize("name", RULES)
def test_rules_say_why(name: str) -> None:
    assert len(RULES[name].why) > 30
