"""Small ragged data for the launches."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """203 rows of uneven length: no batch size of the tests divides them."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    chance = random.Random(7)
    with path.open("w") as stream:
        for number in range(203):
            words = [chance.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(chance.randint(1, 24))]
            stream.write(json.dumps({"source": f"{number} " + " ".join(words), "target": " ".join(words[:5])}) + "\n")
    return path
