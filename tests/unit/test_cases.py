"""A bank of files that occurred in public, with the right verdict for each, where it lies beside this repository.

SCALETOOL_CASES names its folder: expected.tsv with the columns path, verdict, must_mention, note. Data files are scored
by tests/cpu/test_case_data.py.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import pytest

from scaletool.doctor.command import examine
from scaletool.doctor.registry import Context

BANK = Path(os.environ.get("SCALETOOL_CASES") or Path(__file__).resolve().parents[3] / "shared" / "cases")


def cases(*, data: bool) -> list[tuple[str, str, str]]:
    if not (BANK / "expected.tsv").is_file():
        return []
    with (BANK / "expected.tsv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        (row["path"], row["verdict"], row["must_mention"] or "")
        for row in rows
        if row["path"].startswith("data/") is data
    ]


@pytest.mark.skipif(not cases(data=False), reason="no bank of cases; SCALETOOL_CASES names its folder")
@pytest.mark.parametrize(("path", "verdict", "pattern"), cases(data=False) or [("", "", "")])
def test_verdict(path: str, verdict: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BANK / Path(path.split()[0]).parent)
    findings = examine([Path(part).name for part in path.split()], Context())[1]
    said = [f"{each.severity}:{each.line} {each.key} {each.message} {each.fix} line {each.line}" for each in findings]
    grave = [each for each in findings if each.severity in ("error", "warning")]
    if verdict == "pass":
        assert findings == []
        return
    assert any(re.search(pattern, text.lower()) for text in said), said
    assert grave
    if verdict == "fail":
        assert any(each.severity == "error" for each in findings), said
