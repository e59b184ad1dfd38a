"""Data files that occurred in public, scored as tests/unit/test_cases.py scores the others."""

from __future__ import annotations

import csv
import os
import re
import sys
from pathlib import Path

import pytest

from scaletool.train.data import __main__ as command

BANK = Path(os.environ.get("SCALETOOL_CASES") or Path(__file__).resolve().parents[3] / "shared" / "cases")
TABLE = BANK / "expected.tsv"
CASES = [("", "", "")]
if TABLE.is_file():
    with TABLE.open(encoding="utf-8") as stream:
        rows = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        CASES = [
            (row["path"], row["verdict"], row["must_mention"] or "")
            for row in rows
            if row["path"].startswith("data/") and row["verdict"]
        ]


@pytest.mark.skipif(not TABLE.is_file(), reason="no bank of cases; SCALETOOL_CASES names its folder")
@pytest.mark.parametrize(("paths", "verdict", "pattern"), CASES)
def test_verdict(
    paths: str, verdict: str, pattern: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(BANK / "data")
    monkeypatch.setattr(sys, "argv", ["inspect", "inspect", *(Path(path).name for path in paths.split())])
    status = command.main()
    lines = capsys.readouterr().out.lower().splitlines()
    said = [line for line in lines if line.startswith(("error:", "warning:", "note:", "  hint:"))]
    if verdict == "pass":
        assert status == 0
        assert not [line for line in said if line.startswith(("error:", "warning:"))]
        assert re.search(pattern, "\n".join(lines))
    else:
        assert any(re.search(pattern, line) for line in said), said
        assert verdict != "fail" or status != 0
