"""Tokenizers and the cache of tokenised data."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.train.data import tokenise, tokenizer
from scaletool.train.data.tokenise import Pair, TokenisedData, load_data
from scaletool.train.data.tokenizer import load_tokenizer

Make = Callable[..., RunConfig]

TEXTS = [
    "plain text",
    " leading and trailing ",
    "two  spaces,\ttab\nand\r\nlines\n\n",
    "don't , really ?",
    "naïve Übung 北京 🦊 e\u0301",
    "\x00\x7f\u200b",
    "",
]


@pytest.fixture
def byte_tokenizer(tiny: Make, tmp_path: Path) -> Any:
    return load_tokenizer(tiny(), tmp_path)


@pytest.fixture
def count_work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every real tokenisation and training of a tokenizer adds a word."""
    done: list[str] = []
    work, trainer = tokenise.tokenise, tokenizer.trainers.UnigramTrainer
    monkeypatch.setattr(tokenise, "tokenise", lambda *given: (done.append("tokenised"), work(*given))[1])
    monkeypatch.setattr(
        tokenizer.trainers, "UnigramTrainer", lambda **given: (done.append("trained"), trainer(**given))[1]
    )
    return done


def load(config: RunConfig) -> Any:
    cache = Path(str(config.data.cache_dir))
    return load_data(config, cache, load_tokenizer(config, cache))


def rows_of(data: TokenisedData) -> list[Pair]:
    return data.pairs(range(len(data)))


def texts_of(data: TokenisedData) -> list[tuple[int, list[int], list[int]]]:
    return [(row.number, row.source.tolist(), row.target.tolist()) for row in rows_of(data)]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_have_the_numbers_of_byt5(text: str, byte_tokenizer: Any) -> None:
    assert byte_tokenizer(text)["input_ids"] == [byte + 3 for byte in text.encode()] + [1]


def test_special_tokens_of_byt5(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == 259


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_come_back(text: str, byte_tokenizer: Any) -> None:
    assert byte_tokenizer.decode(byte_tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_cut_texts_keep_their_end_mark(tiny: Make) -> None:
    train, _ = load(tiny(data__max_source_tokens=10, data__max_target_tokens=5))
    assert train.source_lengths.max() == 10
    assert train.target_lengths.max() == 5
    for row in rows_of(train):
        assert row.source[-1] == row.target[-1] == 1


def test_lengths_are_those_of_the_rows(tiny: Make) -> None:
    train, validation = load(tiny())
    assert validation is None
    assert train.source_lengths.tolist() == [len(row.source) for row in rows_of(train)]
    assert train.target_lengths.tolist() == [len(row.target) for row in rows_of(train)]
    assert train.numbers.tolist() == list(range(60))


def test_second_load_comes_from_the_cache(tiny: Make, rows_file: Path, count_work: list[str]) -> None:
    first, _ = load(tiny())
    again, _ = load(tiny())
    assert count_work == ["tokenised"]
    assert texts_of(again) == texts_of(first)
    moved = rows_file.rename(rows_file.with_name("other.jsonl"))
    os.utime(moved, (1, 1))
    load(tiny(data__train=[str(moved)]))
    assert count_work == ["tokenised"]  # content counts, not name or date


def test_changed_file_is_tokenised_again(tiny: Make, rows_file: Path, count_work: list[str]) -> None:
    load(tiny())
    before = rows_file.stat()
    rows_file.write_text(rows_file.read_text(encoding="utf-8").replace("fox", "cat"), encoding="utf-8")
    os.utime(rows_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert rows_file.stat().st_size == before.st_size
    train, _ = load(tiny())
    assert count_work == ["tokenised", "tokenised"]
    assert any(bytes(number - 3 for number in row.source[:-1]).find(b"cat") >= 0 for row in rows_of(train))


@pytest.mark.parametrize(
    "change",
    [
        {"data__source": "q: {source}"},
        {"data__target": "{source}"},
        {"data__max_source_tokens": 20},
        {"data__max_target_tokens": 20},
        {"data__on_bad_row": "skip"},
        {"tokenizer__kind": "train", "tokenizer__vocab_size": 300},
    ],
)
def test_other_settings_are_another_entry(change: dict[str, Any], tiny: Make, count_work: list[str]) -> None:
    load(tiny())
    load(tiny(**change))
    assert count_work.count("tokenised") == 2


@pytest.mark.parametrize("change", [{"data__seed": 3}, {"data__per_device_batch_size": 2}, {"train__seed": 1}])
def test_settings_that_change_no_token_share_the_entry(
    change: dict[str, Any], tiny: Make, count_work: list[str]
) -> None:
    load(tiny())
    load(tiny(**change))
    assert count_work == ["tokenised"]


def test_trained_tokenizer_is_cached(tiny: Make, count_work: list[str]) -> None:
    config = tiny(tokenizer__kind="train", tokenizer__vocab_size=300)
    cache = Path(str(config.data.cache_dir))
    cache.mkdir()
    first, again = load_tokenizer(config, cache), load_tokenizer(config, cache)
    assert count_work == ["trained"]
    assert first.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert (first.pad_token_id, first.eos_token_id, first.unk_token_id) == (0, 1, 2)
    assert len(first) <= 300
    text = "the quick brown fox"
    numbers = first(text)["input_ids"]
    assert numbers[-1] == 1
    assert first.decode(numbers, skip_special_tokens=True) == text


def test_validation_share_is_held_out(tiny: Make) -> None:
    train, validation = load(tiny(data__validation=0.1))
    held_out, trained = set(validation.numbers), set(train.numbers)
    assert len(held_out) == 6
    assert held_out.isdisjoint(trained)
    assert held_out | trained == set(range(60))
    assert validation.source_lengths.tolist() == [len(row.source) for row in rows_of(validation)]
    again = load(tiny(data__validation=0.1))[1]
    other = load(tiny(data__validation=0.1, data__seed=1))[1]
    assert set(again.numbers) == held_out != set(other.numbers)


def test_small_share_holds_out_one_row(tiny: Make) -> None:
    train, validation = load(tiny(data__validation=0.001))
    assert (len(train), len(validation)) == (59, 1)


def test_validation_files(tiny: Make, tmp_path: Path) -> None:
    path = tmp_path / "held_out.csv"
    path.write_text("source,target\na,b\n")
    train, validation = load(tiny(data__validation=[str(path)]))
    assert (len(train), len(validation)) == (60, 1)


def test_skipped_rows_are_told_from_the_cache_too(tiny: Make, rows_file: Path) -> None:
    with rows_file.open("a") as stream:
        stream.write("{\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:61: not valid JSON"):
        load(tiny())
    for _ in range(2):
        train, _ = load(tiny(data__on_bad_row="skip"))
        assert (len(train), train.skipped_rows) == (60, 1)
        assert "rows.jsonl:61" in str(train.first_skipped)


@pytest.mark.parametrize("content", ["", "{\n"])
def test_no_usable_row(content: str, tiny: Make, rows_file: Path) -> None:
    rows_file.write_text(content)
    with pytest.raises(ConfigError, match="no usable rows"):
        load(tiny(data__on_bad_row="skip"))


def test_failed_tokenisation_leaves_no_entry(tiny: Make, rows_file: Path) -> None:
    config = tiny()
    rows_file.write_text("{\n")
    with pytest.raises(ConfigError):
        load(config)
    assert [path.name for path in Path(str(config.data.cache_dir)).iterdir() if path.is_dir()] == []


def test_missing_tokenizer_folder(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tiny(tokenizer__kind="path", tokenizer__path=str(tmp_path / "none")), tmp_path)


def test_saved_tokenizer_is_read_by_path(tiny: Make, byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer.save_pretrained(tmp_path / "saved")
    read = load_tokenizer(tiny(tokenizer__kind="path", tokenizer__path=str(tmp_path / "saved")), tmp_path)
    assert read("é")["input_ids"] == byte_tokenizer("é")["input_ids"]


@pytest.mark.parametrize("damage", ["lengths.npy", "facts.json", "part-000000.arrow"])
def test_a_damaged_cache_is_built_again(damage: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"source": "one", "target": "two"}\n')
    config = RunConfig().replace(data__train=[str(tmp_path / "a.jsonl")])
    tokenizer = load_tokenizer(config, tmp_path)
    first, _ = load_data(config, tmp_path, tokenizer)
    (entry,) = [path for path in tmp_path.glob("tokens-*") if path.is_dir()]
    expected = texts_of(first)
    (entry / damage).unlink()
    (entry / damage).write_bytes(b"x")
    again, _ = load_data(config, tmp_path, tokenizer)
    assert texts_of(again) == expected
