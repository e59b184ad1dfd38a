"""Reading files: every format, and the place and text of every kind of damage."""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from scaletool.config import DataConfig
from scaletool.errors import ConfigError
from scaletool.train.data.readers import DELIMITERS
from scaletool.train.data.sources import Source, find_files, stdlib_pairs

PAIRS = [("one", "eins"), ("zwei ü", "two"), ("三", "drei"), ("four, 4", 'vier "4"')]
JSONL = "".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in PAIRS)


def source_of(*paths: Path | str, **settings: Any) -> Source:
    return Source([str(path) for path in paths], DataConfig(**settings), Path(tempfile.mkdtemp()))


def pairs(path: Path, **options: Any) -> list[tuple[str, str]]:
    return [(example.source, example.target) for example in source_of(path, **options)]


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        pairs(path, **options)
    return str(caught.value)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- formats


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "A.JSONL", "a.v2.jsonl"])
def test_json_lines(name: str, tmp_path: Path) -> None:
    assert pairs(write(tmp_path / name, JSONL)) == PAIRS


@pytest.mark.parametrize(
    "text", [JSONL.replace("\n", "\r\n"), JSONL.replace("\n", "\n\n"), JSONL.rstrip("\n"), "\ufeff" + JSONL]
)
def test_json_lines_of_other_systems(text: str, tmp_path: Path) -> None:
    assert pairs(write(tmp_path / "a.jsonl", text)) == PAIRS


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl", "a.JSONL.GZ"])
def test_gzip_is_known_by_content(name: str, tmp_path: Path) -> None:
    assert pairs(write(tmp_path / name, gzip.compress(JSONL.encode()))) == PAIRS


def test_plain_text_named_gz(tmp_path: Path) -> None:
    assert pairs(write(tmp_path / "a.jsonl.gz", JSONL)) == PAIRS


@pytest.mark.parametrize("packed", [False, True])
def test_csv_with_semicolons_quoted_newlines_and_byte_order_mark(packed: bool, tmp_path: Path) -> None:
    text = '\ufeffsource;target\r\n"first\nsecond; third";"say ""hi"""\r\nü;x\r\n'
    content = gzip.compress(text.encode()) if packed else text.encode()
    path = write(tmp_path / ("a.csv.gz" if packed else "a.csv"), content)
    assert pairs(path, delimiter=";") == [("first\nsecond; third", 'say "hi"'), ("ü", "x")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_with_another_delimiter_is_refused_until_it_is_named(delimiter: str, tmp_path: Path) -> None:
    text = delimiter.join(["id", "source", "target"]) + "\n" + delimiter.join(["1", "a", "b"])
    path = write(tmp_path / "a.csv", text)
    assert pairs(path, delimiter=delimiter) == [("a", "b")]
    if delimiter == ",":
        assert pairs(path) == [("a", "b")]
    else:
        assert f"the delimiter is a {DELIMITERS[delimiter]}, .csv means a comma" in refusal(path)
        assert "data.delimiter" in refusal(path)


def test_tsv_keeps_commas(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "source\ttarget\na, b; c\td\n")
    assert pairs(path) == [("a, b; c", "d")]


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"source": [source for source, _ in PAIRS], "target": [target for _, target in PAIRS]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert pairs(tmp_path / "a.parquet") == PAIRS


def test_templates_join_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"question": "q{x}", "context of": "c", "answer": "a"}\n')
    assert pairs(path, source="{{q}}: {question} {context of}", target="{answer}.") == [("{q}: q{x} c", "a.")]


def test_rows_are_numbered_over_files(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", JSONL)
    write(tmp_path / "a.csv", "source,target\n1,2\n")
    source = source_of(tmp_path / "*.jsonl", tmp_path / "a.csv")
    assert [example.row for example in source] == [0, 1, 2, 3, 4]
    assert [example.source for example in source][-1] == "1"  # a second pass gives the same


def test_standard_library_gives_enough_pairs() -> None:
    taken = list(itertools.islice(stdlib_pairs(), 1001))
    assert len(taken) == 1001
    assert all(pair["source"].strip() and pair["target"].strip() for pair in taken)
    assert not any(pair["target"] in pair["source"] for pair in taken[:100] if len(pair["target"]) > 60)


# --- damage that one row carries


BAD_LINES = {
    "truncated": (b'{"source": "a", "tar', "not valid JSON"),
    "missing": (b'{"source": "a"}', "no value for column target (columns: source)"),
    "null": (b'{"source": "a", "target": null}', "no value for column target"),
    "number": (b'{"source": "a", "target": 3}', "column target is int 3, expected text"),
    "list": (b'{"source": ["a"], "target": "b"}', "column source is list"),
    "no object": (b'"text"', "not a JSON object"),
    "empty": (b'{"source": "a", "target": ""}', "the target is empty"),
    "blank": (b'{"source": "a", "target": " \\t\\n"}', "the target is empty"),
    "shapeless": (b'{"source": "a", "target": "\\u200b\\u2060\\ufeff"}', "the target is empty"),
    "merge": (b"<<<<<<< HEAD", "a merge conflict marker"),
    "not a number": (b'{"source": "a", "target": NaN}', "column target is float nan, expected text"),
    "nested": (b"[" * 100_000, "nested too deeply"),
    "latin-1": (b'{"source": "caf\xe9", "target": "b"}', "byte 0xe9 at column 16 is not UTF-8"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("last", [False, True])
def test_bad_line_is_named(line: bytes, message: str, last: bool, tmp_path: Path) -> None:
    content = JSONL.encode() + line if last else JSONL.encode() + line + b"\n" + JSONL.encode()
    text = refusal(write(tmp_path / "a.jsonl", content))
    assert f"{tmp_path / 'a.jsonl'}:5: " in text
    assert message in text
    assert "at data.train" in text
    assert "data.on_bad_row: skip" in text


def test_skipping_counts_and_keeps_the_first(tmp_path: Path) -> None:
    content = b"\n".join(
        [JSONL.encode().rstrip(), *(line for line, _ in BAD_LINES.values()), b'{"source": "x", "target": "y"}']
    )
    source = source_of(write(tmp_path / "a.jsonl", content), on_bad_row="skip")
    examples = list(source)
    assert [(example.source, example.target) for example in examples] == [*PAIRS, ("x", "y")]
    assert examples[-1].row == len(PAIRS) + len(BAD_LINES)  # bad rows keep their numbers
    assert source.bad_rows.count == len(BAD_LINES)
    assert (source.bad_rows.first or "").startswith(f"{tmp_path / 'a.jsonl'}:5: not valid JSON")


def test_half_a_surrogate_pair_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", JSONL + r'{"source": "\ud83d", "target": "b"}')
    assert pairs(path, on_bad_row="skip") == PAIRS
    assert "a.jsonl:5: half a surrogate pair" in refusal(path)


def test_csv_row_of_another_width(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'source,target\n"a\nb",c\nd\ne,f,g\nh,i\n')
    assert f"{path}:4: 1 fields, the header names 2" in refusal(path)
    source = source_of(path, on_bad_row="skip")
    assert [example.target for example in source] == ["c", "i"]
    assert source.bad_rows.count == 2


def test_parquet_null_has_a_row_number(tmp_path: Path) -> None:
    table = pyarrow.table({"source": ["a", "b"], "target": ["c", None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "a.parquet:row 2: no value for column target" in refusal(tmp_path / "a.parquet")


# --- damage of a whole file


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize(
    "text", ['[{"source": "a", "target": "b"}]', '[\n {"source": "a", "target": "b"}\n]\n', "\ufeff  [1]"]
)
def test_one_json_array_is_refused(text: str, policy: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "a.json", text), on_bad_row=policy)
    assert "is one JSON array" in message
    assert "one JSON object per line" in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.jsonl.gz"])
def test_empty_file_has_no_rows(name: str, tmp_path: Path) -> None:
    assert pairs(write(tmp_path / name, "")) == []


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_gzip(name: str, damage: str, tmp_path: Path) -> None:
    text = "source,target\n" + "a,b\n" * 500 if "csv" in name else JSONL * 500
    packed = bytearray(gzip.compress(text.encode()))
    packed = packed[: len(packed) // 2] if damage == "cut" else packed[:30] + bytes(8) + packed[38:]
    message = refusal(write(tmp_path / name, bytes(packed)), on_bad_row="skip")
    assert name in message
    assert "damaged gzip" in message
    assert "rows before it are readable" in message


@pytest.mark.parametrize("bad_line", [2, 3, 3000])
def test_csv_that_is_not_utf8_names_the_line(bad_line: int, tmp_path: Path) -> None:
    lines = [b"source,target"] + [b"caf\xe9,b" if line == bad_line else b"a,b" for line in range(2, 4000)]
    path = write(tmp_path / "a.csv", b"\n".join(lines))
    assert f"a.csv:{bad_line}: byte 0xe9 at column 4 is not UTF-8" in refusal(path)
    assert len(pairs(path, on_bad_row="skip")) == 3997


def test_csv_with_an_open_quote(tmp_path: Path) -> None:
    assert "cannot be read as CSV" in refusal(write(tmp_path / "a.csv", 'source,target\n"a,b\n'))


@pytest.mark.parametrize("content", [b"", b"PAR1", JSONL.encode()])
def test_damaged_parquet(content: bytes, tmp_path: Path) -> None:
    assert "not readable as Parquet" in refusal(write(tmp_path / "a.parquet", content))


# --- finding files


def test_globs_are_sorted_and_given_order_is_kept(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "z/c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "")
    found = find_files([str(tmp_path / "**/*.csv"), str(tmp_path / "*.jsonl")], "data.train")
    assert found == [tmp_path / "z/c.csv", tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def test_name_with_glob_characters(tmp_path: Path) -> None:
    assert pairs(write(tmp_path / "a[1].jsonl", JSONL)) == PAIRS


@pytest.mark.parametrize("pattern", ["none.jsonl", "*.jsonl"])
def test_nothing_there(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        find_files([str(tmp_path / pattern)], "data.validation")
    assert caught.value.where == "data.validation"


@pytest.mark.parametrize("name", ["a.txt", "a", "a.gz", "a.jsonl.bz2"])
def test_unknown_ending_is_fine_where_the_content_is_json_lines(name: str, tmp_path: Path) -> None:
    assert pairs(write(tmp_path / name, JSONL)) == PAIRS


@pytest.mark.parametrize("content", ["", "source,target\na,b\n", "plain text\n", b"BZh91AY&SY\x00\xff"])
def test_unknown_ending_and_unknown_content(content: str | bytes, tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "a.txt", content))
    assert "no known ending" in message
    assert ".jsonl" in message


@pytest.mark.parametrize("name", ["no-such-name", "no-such/name", "no-such/name:validation"])
def test_name_that_is_neither_file_nor_hub_data_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} is neither a file nor a data set") as caught:
        Source([name], DataConfig(), tmp_path / "scratch", "data.validation")
    assert caught.value.where == "data.validation"
    assert str(tmp_path) in str(caught.value.hint)
