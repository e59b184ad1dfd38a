"""A tiny data set in a file, for tests in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletool.config import RunConfig

# datasets starts pyarrow's threads; imported after torch it can hang at exit, so it comes first.
import datasets  # noqa: F401, I001

WORDS = "the quick brown fox jumps over a lazy dog while naïve readers count 12 sheep".split()


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """60 ragged pairs."""
    path = tmp_path / "rows.jsonl"
    write_rows(path, 60)
    return path


def write_rows(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for row in range(count):
            words = [WORDS[(row * 7 + place) % len(WORDS)] for place in range(2 + (row * 5) % 17)]
            stream.write(json.dumps({"source": " ".join(words), "target": " ".join(words[: 1 + row % 4])}) + "\n")


@pytest.fixture
def tiny(rows_file: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """The default config on the 60 pairs with a cache of its own; keyword arguments as for RunConfig.replace."""

    def make(**changes: Any) -> RunConfig:
        defaults = {"data__train": [str(rows_file)], "data__cache_dir": str(tmp_path / "cache")}
        return RunConfig().replace(**{**defaults, **changes})

    return make
