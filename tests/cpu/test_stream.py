"""A stream gives what tokenised data would, and meets its bad rows on the way."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.train.data.batches import Collator, MicroBatch
from scaletool.train.data.readers import BadRow
from scaletool.train.data.stream import StreamedData, load_stream
from scaletool.train.data.tokenise import load_data
from scaletool.train.data.tokenizer import load_tokenizer

Make = Callable[..., RunConfig]


def stream_of(config: RunConfig) -> tuple[StreamedData, Any]:
    cache = Path(str(config.data.cache_dir))
    return load_stream(config, cache, load_tokenizer(config, cache))


def tokens(data: Any, rows: list[int]) -> list[tuple[int, list[int], list[int]] | str]:
    return [
        str(row) if isinstance(row, BadRow) else (row.number, row.source.tolist(), row.target.tolist())
        for row in data.pairs(rows)
    ]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"data__max_source_tokens": 20, "data__max_target_tokens": 5},
        {"data__source": "q: {source}", "data__target": "{source}"},
        {"tokenizer__kind": "train", "tokenizer__vocab_size": 300},
        {"data__validation": 0.2},
    ],
    ids=str,
)
def test_tokens_are_those_of_tokenised_data(change: dict[str, Any], tiny: Make, tmp_path: Path) -> None:
    config = tiny(**change)
    cache = tmp_path / "cache"
    cache.mkdir()
    tokenizer = load_tokenizer(config, cache)
    for streamed, tokenised in zip(
        load_stream(config, cache, tokenizer), load_data(config, cache, tokenizer), strict=True
    ):
        if tokenised is None:
            assert streamed is None
            continue
        assert len(streamed) == len(tokenised)
        rows = list(range(len(tokenised)))[:200]
        assert tokens(streamed, rows) == tokens(tokenised, rows)
        assert tokens(streamed, rows[::-7]) == tokens(tokenised, rows[::-7])
        assert tokens(streamed, []) == []


def test_held_out_files_are_tokenised_ahead(tiny: Make, write_rows: Callable[[Path], Path], tmp_path: Path) -> None:
    config = tiny(data__validation=[str(write_rows(tmp_path / "held.jsonl"))])
    train, held_out = stream_of(config)
    assert (len(train), len(held_out)) == (60, 60)
    assert tokens(held_out, [3]) == tokens(train, [3])


def test_only_the_index_is_kept(tiny: Make, tmp_path: Path) -> None:
    stream_of(tiny())
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 4096
    assert not list((tmp_path / "cache").glob("tokens-*"))


def test_bad_rows_under_error_name_file_and_line(tiny: Make, rows_file: Path) -> None:
    with rows_file.open("a") as stream:
        stream.write('\n{"source": "a"}\n')
    train, _ = stream_of(tiny())
    assert len(train) == 61
    assert len(tokens(train, list(range(60)))) == 60
    with pytest.raises(ConfigError, match=r"rows\.jsonl:62: no value for column target") as caught:
        train.pairs([4, 60])
    assert caught.value.where == "data.train"
    item = Collator(train, 0)[MicroBatch(0, 1, 0, ((4, 60),), None)]
    assert isinstance(item, ConfigError)  # an exception would lose its form on the way from a loader process
    assert "rows.jsonl:62" in str(item)


def test_bad_rows_under_skip_are_told_with_the_batch(tiny: Make, rows_file: Path) -> None:
    lines = rows_file.read_text(encoding="utf-8").splitlines()
    lines[3], lines[7], lines[20] = "{", '{"source": "a", "target": ""}', '"text"'
    rows_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    train, _ = stream_of(tiny(data__on_bad_row="skip"))
    batch = Collator(train, 0)[MicroBatch(0, 1, 0, ((2, 3, 4, 7, 8, 20),), None)]
    assert isinstance(batch, dict)
    info = batch["info"]
    assert info.rows == (2, 4, 8)
    assert [problem.split(": ")[0] for problem in info.bad_rows] == [f"{rows_file}:{line}" for line in (4, 8, 21)]
    assert batch["input_ids"].shape[0] == 3
    assert train.source.bad_rows.count == 3
    alone = Collator(train, 0)[MicroBatch(0, 1, 0, ((3, 7),), None)]
    assert isinstance(alone, dict)
    assert (alone["info"].rows, alone["info"].target_tokens, len(alone["info"].bad_rows)) == ((), 0, 2)
    assert (alone["labels"] == -100).all()


def test_empty_file(tiny: Make, rows_file: Path) -> None:
    rows_file.write_text("\n\n")
    with pytest.raises(ConfigError, match=r"no rows in .*rows\.jsonl: empty"):
        stream_of(tiny())


def test_the_index_is_made_once(tiny: Make, rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokens(stream_of(tiny())[0], [1, 2])
    monkeypatch.setattr("scaletool.train.data.readers.LineRows._index", lambda self: 1 / 0)
    assert tokens(stream_of(tiny())[0], [1, 2]) == first
    assert tokens(stream_of(tiny(data__source="q: {source}"))[0], [1]) != first[:1]  # templates are no part of it


def test_the_index_follows_the_file(tiny: Make, rows_file: Path) -> None:
    stream_of(tiny())
    with rows_file.open("a") as stream:
        stream.write(json.dumps({"source": "new", "target": "row"}) + "\n")
    assert len(stream_of(tiny())[0]) == 61
    before = rows_file.stat()
    lines = rows_file.read_text(encoding="utf-8").splitlines()
    rows_file.write_text("\n".join(lines[::-1]) + "\n", encoding="utf-8")
    os.utime(rows_file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**7))
    assert tokens(stream_of(tiny())[0], [0])[0][1] == [byte + 3 for byte in b"new"] + [1]  # type: ignore[index]


def test_a_folder_that_was_saved_again_is_indexed_again(tiny: Make, tmp_path: Path) -> None:
    for rows in (3, 5):
        columns = {"source": [f"source {row}" for row in range(rows)], "target": ["t"] * rows}
        datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
        assert len(stream_of(tiny(data__train=[str(tmp_path / "saved")]))[0]) == rows


def test_a_damaged_index_is_made_again(tiny: Make, tmp_path: Path) -> None:
    first = tokens(stream_of(tiny())[0], [1, 2])
    for content in (b"", b"x", b"\x80\x04N"):
        (kept,) = (tmp_path / "cache").glob("stream-*/readers.pickle")
        kept.write_bytes(content)
        assert tokens(stream_of(tiny())[0], [1, 2]) == first
    for index in (tmp_path / "cache").rglob("index.npy"):
        index.unlink()
    assert tokens(stream_of(tiny())[0], [1, 2]) == first


def test_a_pickled_stream_reads_the_same(tiny: Make) -> None:
    train, held_out = stream_of(tiny(data__validation=0.1))
    for data in (train, held_out):
        data.pairs([0])
        assert tokens(pickle.loads(pickle.dumps(data)), [2, 0]) == tokens(data, [2, 0])
