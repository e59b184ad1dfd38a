"""The benchmark's programs run and leave a window, and its report shows what was measured. No speed is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, run
from scaletool.record import read_json, write_json


@pytest.mark.parametrize("name", ["bare", "stock_grouped", "thread_custom"])
def test_peer_leaves_a_window(name: str, rows_file: Path, tmp_path: Path) -> None:
    config = run._config(
        tmp_path,
        1,
        model__name="tiny",
        tokenizer__kind="bytes",
        data__train=[str(rows_file)],
        data__per_device_batch_size=2,
        data__cache_dir=str(tmp_path / "cache"),
    )
    content: Any = read_json(run._launch(run.PEERS[name], config, 1) / "window.json")
    window = content["window"]
    assert 0 < window["real_tokens"] <= window["padded_tokens"]
    assert window["samples"] == 2
    assert window["imbalance"] == 1.0
    assert window["seconds"] > 0


def test_report_shows_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = report.summary(
        [{"real_tokens_per_second": 1234.5, "padding_share": 0.25, "imbalance": None, "peak_bytes": 2**20}]
    )
    results = {
        "setup": {"rounds": 3, "steps": 16, "batch": 8, "packed_batch": 4, "best": "packed/custom", "thread": "t"}
        | run.MODEL,
        "machine": {"cpu_count": 2, "processor": "x86_64"},
        "programs": {"bare": {"2": program}},
        "ratios": {"custom/bare": {"median": 1.0234, "low": 0.9, "high": 1.1, "rounds": 3}},
        "measures": {"imbalance_8": 1.0012},
    }
    write_json(tmp_path / "results.json", results)
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    report.write(tmp_path / "results.json")
    page = (tmp_path / "page.md").read_text()
    for text in ("1,234", "25.0%", "1.023", "0.900 to 1.100", "1.001", "packed/custom"):
        assert text in page
