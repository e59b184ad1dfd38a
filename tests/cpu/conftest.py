"""A tiny data set in a file, for tests in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletool.config import RunConfig

WORDS = "the quick brown fox jumps over a lazy dog while naïve readers count 12 sheep".split()


@pytest.fixture(scope="session")
def write_rows() -> Callable[[Path], Path]:
    """Writes 60 ragged pairs to a file."""

    def write(path: Path) -> Path:
        with path.open("w", encoding="utf-8") as stream:
            for row in range(60):
                words = [WORDS[(row * 7 + place) % len(WORDS)] for place in range(2 + (row * 5) % 17)]
                pair = {"source": " ".join(words), "target": " ".join(words[: 1 + row % 4])}
                stream.write(json.dumps(pair) + "\n")
        return path

    return write


@pytest.fixture
def rows_file(write_rows: Callable[[Path], Path], tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.fixture
def tiny(rows_file: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """The default config on the 60 pairs with a cache of its own; keyword arguments as for RunConfig.replace."""

    def make(**changes: Any) -> RunConfig:
        defaults = {"data__train": [str(rows_file)], "data__cache_dir": str(tmp_path / "cache")}
        return RunConfig().replace(**{**defaults, **changes})

    return make
