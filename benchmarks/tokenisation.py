"""scaletool's tokenise(), files to Arrow on disk, against the tokenizers library alone on texts in memory.

In one process and on all cores, in turn. The library's side is its fastest call on the same texts in the same blocks,
and taking the numbers out; it reads nothing, writes nothing and checks nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import open_run
from scaletool.config import RunConfig
from scaletool.record import write_json
from scaletool.train.data.sources import Source
from scaletool.train.data.tokenise import ROWS_PER_CALL, tokenise

COPIES = 4  # of the rows, so that one measurement takes seconds


def measure(config: RunConfig, tokenizer: Any, rounds: int) -> dict[str, list[float]]:
    """Rows per second of both sides, by round. Round 0 warms up and is left out."""
    speeds: dict[str, list[float]] = {"tokenise": [], "tokenizers": []}
    with tempfile.TemporaryDirectory() as folder:
        pairs = list(Source(["stdlib"], config.data, Path(folder) / "stdlib")) * COPIES
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as stream:
            stream.writelines(json.dumps({"source": pair.source, "target": pair.target}) + "\n" for pair in pairs)
        texts = [
            ([pair.source for pair in pairs], config.data.max_source_tokens),
            ([pair.target for pair in pairs], config.data.max_target_tokens),
        ]
        for number in range(rounds + 1):
            for name in ("tokenise", "tokenizers")[:: 1 if number % 2 else -1]:
                out = Path(folder) / "out"
                out.mkdir()
                started = time.perf_counter()
                if name == "tokenise":
                    tokenise(Source([str(path)], config.data, Path(folder) / "index"), tokenizer, config.data, out)
                else:
                    library_alone(tokenizer, texts)
                if number:
                    speeds[name].append(len(pairs) / (time.perf_counter() - started))
                shutil.rmtree(out)
    return speeds


def library_alone(tokenizer: Any, texts: list[tuple[list[str], int]]) -> None:
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    for column, limit in texts:
        backend.enable_truncation(limit)
        for start in range(0, len(column), ROWS_PER_CALL):
            for encoding in backend.encode_batch_fast(column[start : start + ROWS_PER_CALL]):
                encoding.ids  # noqa: B018


def main(path: str, rounds: str) -> None:
    config, tokenizer, _, _ = open_run(path)
    write_json(Path(str(config.train.output_dir)) / "speeds.json", measure(config, tokenizer, int(rounds)))


if __name__ == "__main__":
    main(*sys.argv[1:3])
