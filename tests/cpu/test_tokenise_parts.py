"""Tokenised data in parts: what was interrupted goes on, and rows keep their numbers over parts."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.train.data import tokenise
from scaletool.train.data.groups import Groups
from scaletool.train.data.sources import Source
from scaletool.train.data.tokenise import TokenisedData, load_data, load_groups, load_tokens
from scaletool.train.data.tokenizer import load_tokenizer

Make = Callable[..., RunConfig]


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "ROWS_PER_PART", 16)
    monkeypatch.setattr(tokenise, "ROWS_PER_CALL", 5)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all rows that were read to be tokenised, in that order."""
    rows: list[int] = []
    work = Source.read
    monkeypatch.setattr(Source, "read", lambda source, asked: (rows.extend(asked), work(source, asked))[1])
    return rows


def load(config: RunConfig, **options: Any) -> TokenisedData:
    cache = Path(str(config.data.cache_dir))
    return load_tokens(config.data.train, "data.train", config, cache, load_tokenizer(config, cache), **options)


def texts(data: TokenisedData, rows: Any = None) -> list[tuple[int, bytes, bytes]]:
    pairs = data.pairs(range(len(data)) if rows is None else rows)
    return [(pair.number, *(bytes(int(n) - 3 for n in side[:-1]) for side in pair[1:])) for pair in pairs]


def expected(path: Path) -> list[tuple[int, bytes, bytes]]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found.append((number, row["source"].encode(), row["target"].encode()))
    return found


def test_rows_of_all_parts(tiny: Make, rows_file: Path, read: list[int]) -> None:
    data = load(tiny())
    assert texts(data) == expected(rows_file)
    assert texts(data, [59, 0, 16, 15, 31, 32]) == [expected(rows_file)[row] for row in (59, 0, 16, 15, 31, 32)]
    assert data.source_lengths.tolist() == [len(source) + 1 for _, source, _ in texts(data)]
    assert len(list(data.folder.glob("part-*.arrow"))) == 4
    assert texts(pickle.loads(pickle.dumps(data))) == texts(data)
    taken = data.take(np.arange(59, 0, -3)).take(np.array([1, 4]))
    assert texts(taken) == texts(pickle.loads(pickle.dumps(taken))) == [expected(rows_file)[row] for row in (56, 47)]
    assert read == list(range(60))


@pytest.mark.parametrize("rows_done", [0, 3, 16, 40, 59])
def test_work_goes_on_behind_the_last_whole_part(
    rows_done: int, tiny: Make, rows_file: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Source.read

    def die(source: Source, rows: Any) -> Any:
        if any(row >= rows_done for row in rows):
            raise Killed
        return work(source, rows)

    with monkeypatch.context() as patched:
        patched.setattr(Source, "read", die)
        with pytest.raises(Killed):
            load(tiny())
    read.clear()
    seen: list[tuple[int, int]] = []
    data = load(tiny(), progress=lambda done, rows: seen.append((done, rows)))
    assert texts(data) == expected(rows_file)
    assert read == list(range(rows_done // 16 * 16, 60))
    assert seen[-1] == (60, 60)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    read.clear()
    load(tiny())
    assert read == []


@pytest.mark.parametrize("where", ["np.save", "write_json", "os.replace"])
@pytest.mark.parametrize("call", range(9))
def test_killed_at_any_place_where_something_is_written(
    where: str, call: int, tiny: Make, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = (
        (tokenise, where) if "." not in where else (getattr(tokenise, where.split(".")[0]), where.split(".")[1])
    )
    work, calls = getattr(module, name), iter(range(1000))

    def die(*given: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise Killed
        return work(*given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, die)
        try:
            load(tiny())
        except Killed:
            pass
    assert texts(load(tiny())) == expected(rows_file)


def test_killed_while_the_parts_are_joined(tiny: Make, rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, calls = Path.unlink, iter(range(1000))

    def die(path: Path, *given: Any, **more: Any) -> None:
        if path.name.startswith("part-") and next(calls) == 2:
            raise Killed
        unlink(path, *given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", die)
        with pytest.raises(Killed):
            load(tiny())
    assert texts(load(tiny())) == expected(rows_file)


def test_another_limit_does_not_go_on_with_parts_of_the_first(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(tokenise.os, "replace", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load(tiny())
    assert load(tiny(data__max_source_tokens=9)).source_lengths.max() == 9


BAD = {
    "some": [3, 17, 40],
    "at the edges": [0, 15, 16, 31, 59],
    "a whole call": list(range(20, 25)),
    "a whole part": list(range(16, 32)),
    "the last part": list(range(48, 60)),
    "all but one": [row for row in range(60) if row != 33],
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_skipped_rows_leave_the_others_their_numbers(bad: list[int], tiny: Make, rows_file: Path) -> None:
    lines = rows_file.read_text(encoding="utf-8").splitlines()
    for row in bad:
        lines[row] = "{"
    rows_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = tiny(data__on_bad_row="skip")
    for _ in range(2):
        data = load(config)
        assert (len(data), data.skipped_rows) == (60 - len(bad), len(bad))
        assert str(data.first_skipped).startswith(f"{rows_file}:{bad[0] + 1}: ")
        assert texts(data) == expected(rows_file)
        assert texts(data, range(len(data) - 1, -1, -2)) == expected(rows_file)[::-1][::2]
        assert data.numbers.tolist() == [row for row in range(60) if row not in bad]
        assert texts(data.take(np.array([0]))) == expected(rows_file)[:1]


def test_skips_of_interrupted_work_are_counted_once(
    tiny: Make, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = rows_file.read_text(encoding="utf-8").splitlines()
    for row in (2, 18, 50):
        lines[row] = "{"
    rows_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = tiny(data__on_bad_row="skip")
    work, calls = tokenise.write_json, iter(range(99))

    def die(*given: Any) -> None:
        if next(calls) == 1:
            raise Killed
        work(*given)

    with monkeypatch.context() as patched:
        patched.setattr(tokenise, "write_json", die)
        with pytest.raises(Killed):
            load(config)
    data = load(config)
    assert data.skipped_rows == 3
    assert "rows.jsonl:3: " in str(data.first_skipped)


def test_a_bad_row_in_a_later_part_ends_the_work(tiny: Make, rows_file: Path, read: list[int]) -> None:
    with rows_file.open("a") as stream:
        stream.write("{\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:61: not valid JSON"):
        load(tiny())
    assert not [path for path in Path(str(tiny().data.cache_dir)).glob("tokens-*") if (path / "facts.json").exists()]


@pytest.mark.parametrize("rows", [["{"] * 40, []])
def test_no_usable_row_in_any_part(rows: list[str], tiny: Make, rows_file: Path) -> None:
    rows_file.write_text("\n".join(rows))
    for _ in range(2):
        with pytest.raises(ConfigError, match="no usable rows"):
            load(tiny(data__on_bad_row="skip"))
    assert not [path for path in Path(str(tiny().data.cache_dir)).iterdir() if path.is_dir()]


@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
@pytest.mark.parametrize(
    "name", ["part-000000.arrow", "part-000003.arrow", "numbers.npy", "lengths.npy", "facts.json", "*.arrow"]
)
def test_a_damaged_entry_is_made_again(name: str, damage: str, tiny: Make, rows_file: Path) -> None:
    folder = load(tiny()).folder
    for path in folder.glob(name):
        content = path.read_bytes()
        path.unlink()
        if damage != "gone":
            path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    assert texts(load(tiny())) == expected(rows_file)


def test_groups_are_made_once_for_each_choice_of_rows(tiny: Make) -> None:
    data, made = load(tiny()), []

    def make() -> Groups:
        made.append(len(made))
        return Groups(np.array([0, 1]), np.array([len(made)]))

    first = load_groups(data, "packs", {"slots": 1}, make)
    assert load_groups(load(tiny()), "packs", {"slots": 1}, make).members.tolist() == first.members.tolist() == [1]
    assert load_groups(data, "packs", {"slots": 2}, make).members.tolist() == [2]
    for start in (0, 1):
        load_groups(data.take(np.arange(start, 40 + start)), "packs", {"slots": 1}, make)
    assert len(made) == 4
    for path in data.folder.glob("packs-*.npz"):
        path.write_bytes(path.read_bytes()[:50])
    assert load_groups(data, "packs", {"slots": 1}, make).members.tolist() == [5]


def test_held_out_share_of_data_in_parts(tiny: Make, rows_file: Path) -> None:
    config = tiny(data__validation=0.3)
    cache = Path(str(config.data.cache_dir))
    train, held_out = load_data(config, cache, load_tokenizer(config, cache))
    assert held_out is not None
    assert sorted(texts(train) + texts(held_out)) == expected(rows_file)
