"""Rows by number: any row of any file, in any order, in any process, and what a damaged file still tells."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from scaletool.config import DataConfig
from scaletool.errors import ConfigError
from scaletool.train.data.readers import BadRow
from scaletool.train.data.sources import Example, Source

ROWS = [(f"source {row} ü" * (row % 5 + 1), f"target {row}") for row in range(200)]


def lines(rows: list[tuple[str, str]] = ROWS) -> bytes:
    return b"".join(json.dumps({"source": s, "target": t}).encode() + b"\n" for s, t in rows)


def table(rows: list[tuple[str, str]] = ROWS) -> bytes:
    return b"source,target\n" + b"".join(f'"{s}","{t}\nmore"\n'.encode() for s, t in rows)


def frames(content: bytes, count: int) -> bytes:
    """zstd data of several frames, as `cat a.zst b.zst` makes."""
    size = -(-len(content) // count)
    parts = (content[start : start + size] for start in range(0, len(content), size))
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def opened(path: Path, **settings: Any) -> Source:
    return Source([str(path)], DataConfig(**settings), path.parent / "scratch")


def texts(source: Source, rows: list[int]) -> list[tuple[str, str] | str]:
    read = source.read(rows)
    return [(entry.source, entry.target) if isinstance(entry, Example) else str(entry) for entry in read]


def problems(path: Path) -> list[str]:
    source = opened(path)
    return [str(entry) for entry in source.read(range(len(source))) if isinstance(entry, BadRow)]


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        list(opened(path, **settings))
    return str(caught.value)


def every_kind(folder: Path) -> dict[str, Path]:
    """The same rows in every form that can be read."""
    columns = {"source": [source for source, _ in ROWS], "target": [target for _, target in ROWS]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "saved"))
    shown = table().replace(b"\nmore", b"")
    return {
        "jsonl": write(folder / "a.jsonl", lines()),
        "jsonl.gz": write(folder / "b.jsonl.gz", gzip.compress(lines())),
        "gzip of two members": write(
            folder / "b2.jsonl.gz", gzip.compress(lines()[:999]) + gzip.compress(lines()[999:])
        ),
        "jsonl.zst": write(folder / "c.jsonl.zst", frames(lines(), 1)),
        "zstd of three frames": write(folder / "c3.jsonl.zst", frames(lines(), 3)),
        "csv": write(folder / "d.csv", shown),
        "csv.gz": write(folder / "e.csv.gz", gzip.compress(shown)),
        "tsv": write(folder / "f.tsv", shown.replace(b'","', b'"\t"').replace(b"source,", b"source\t")),
        "parquet": parquet(folder / "g.parquet", columns, row_group_size=7),
        "one row group": parquet(folder / "h.parquet", columns),
        "folder": folder / "saved",
    }


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return every_kind(tmp_path_factory.mktemp("kinds"))


KINDS = (
    "jsonl,jsonl.gz,gzip of two members,jsonl.zst,zstd of three frames,csv,csv.gz,tsv,parquet,one row group,folder"
).split(",")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_any_order(kind: str, kinds: dict[str, Path], tmp_path: Path) -> None:
    source = Source([str(kinds[kind])], DataConfig(), tmp_path / "scratch")
    assert len(source) == len(ROWS) == len(source.sizes())
    asked = random.Random(0).choices(range(len(ROWS)), k=300)  # some rows more than once
    assert texts(source, asked) == [ROWS[row] for row in asked]
    assert texts(source, []) == []
    assert [entry.row for entry in source.read(asked[:9])] == asked[:9]


def test_rows_of_many_files_in_any_order(kinds: dict[str, Path], tmp_path: Path) -> None:
    source = Source([str(path) for path in kinds.values()], DataConfig(), tmp_path / "scratch")
    assert len(source) == len(ROWS) * len(kinds)
    asked = random.Random(1).sample(range(len(source)), k=500)
    assert texts(source, asked) == [ROWS[row % len(ROWS)] for row in asked]
    assert [entry.row for entry in source.read(asked)] == asked


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_source_reads_the_same(kind: str, kinds: dict[str, Path], tmp_path: Path) -> None:
    source = Source([str(kinds[kind])], DataConfig(), tmp_path / "scratch")
    source.read([5])  # with a file open
    copy = pickle.loads(pickle.dumps(source))
    assert texts(copy, [199, 0, 7]) == texts(source, [199, 0, 7]) == [ROWS[199], ROWS[0], ROWS[7]]
    assert (len(copy), copy.notes) == (len(source), source.notes)


def test_sizes_tell_long_rows_from_short_ones(tmp_path: Path) -> None:
    for path in (write(tmp_path / "a.jsonl", lines()), write(tmp_path / "b.csv", table())):
        sizes = opened(path).sizes()
        assert all(sizes[row] < sizes[row + 1] for row in range(0, 195, 5))
        assert sizes.sum() <= path.stat().st_size


# --- what a name says and what is inside


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("a.jsonl", gzip.compress(lines()), "is gzip data under another ending"),
        ("a.jsonl", frames(lines(), 1), "is zstd data under another ending"),
        ("a.jsonl.gz", frames(lines(), 1), "is zstd data under another ending"),
        ("a.jsonl.zst", gzip.compress(lines()), "is gzip data under another ending"),
        ("a.csv", lines(), "holds JSON lines, not what its ending says"),
        ("a.jsonl.zst", lines(), None),
        ("a.txt", lines(), None),
        ("a", lines(), None),
    ],
)
def test_content_counts_more_than_the_ending(name: str, content: bytes, note: str | None, tmp_path: Path) -> None:
    source = opened(write(tmp_path / name, content))
    assert texts(source, [3, 150]) == [ROWS[3], ROWS[150]]
    assert len(source.notes) == (note is not None)
    assert note is None or note in source.notes[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.bin", "a"])
def test_parquet_under_another_name(name: str, tmp_path: Path) -> None:
    parquet(tmp_path / "b.parquet", {"source": ["s"], "target": ["t"]})
    source = opened((tmp_path / "b.parquet").rename(tmp_path / name))
    assert texts(source, [0]) == [("s", "t")]
    assert any("holds Parquet" in note for note in source.notes) == (name in ("a.jsonl", "a.csv"))


@pytest.mark.parametrize("mark", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_utf_16_is_named(name: str, mark: str, tmp_path: Path) -> None:
    content = ("\ufeff" + lines().decode()).encode(mark)
    path = write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    message = refusal(path)
    assert "is UTF-16" in message
    assert "convert it to UTF-8" in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv"])
def test_byte_order_mark_is_no_part_of_the_first_row(name: str, tmp_path: Path) -> None:
    mark = "\t" if name == "a.tsv" else ","
    rows = lines() if name == "a.jsonl" else f"source{mark}target\na{mark}b\n".encode()
    source = opened(write(tmp_path / name, b"\xef\xbb\xbf" + rows))
    assert texts(source, [0]) == [ROWS[0] if name == "a.jsonl" else ("a", "b")]


# --- lines


def test_line_separators_of_unicode_end_no_row(tmp_path: Path) -> None:
    strange = [(f"a{mark}b", f"c{mark}d") for mark in ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c")]
    raw = "".join(json.dumps({"source": s, "target": t}, ensure_ascii=s[1] < " ") + "\n" for s, t in strange)
    for end in ("\n", "\r\n"):
        source = opened(write(tmp_path / "a.jsonl", raw.replace("\n", end)))
        assert texts(source, list(range(len(source)))) == strange
    cells = "source,target\n" + "".join(f"{s},{t}\n" for s, t in strange)
    source = opened(write(tmp_path / "a.csv", cells))
    assert texts(source, list(range(len(source)))) == strange


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    first, second = lines(ROWS[:2]).splitlines(keepends=True)
    path = write(tmp_path / "a.jsonl", b"\n  \n" + first + b"\r\n\t\n" + b"{\n" + b"\n" + second + b"\n\n")
    source = opened(path)
    assert len(source) == 3
    assert texts(source, [2, 0]) == [ROWS[1], ROWS[0]]
    assert "a.jsonl:6: not valid JSON" in str(source.read([1])[0])


def test_merge_markers_are_named_with_their_lines(tmp_path: Path) -> None:
    marks = [b"<<<<<<< HEAD\n", b"||||||| base\n", b"=======\n", b">>>>>>> other\n"]
    path = write(tmp_path / "a.jsonl", lines(ROWS[:1]).join([b"", *marks, b""]))
    found = problems(path)
    assert len(found) == 4
    for line, problem in zip((2, 4, 6, 8), found, strict=True):
        assert f"a.jsonl:{line}: a merge conflict marker" in problem


@pytest.mark.parametrize("cut", [1, 12, 30])
def test_truncated_last_line_says_so(cut: int, tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path / "a.jsonl", lines(ROWS[:5])[: -cut - 1]))
    assert "a.jsonl:5: not valid JSON" in problem
    assert "the file ends inside this row: truncated" in problem
    (problem,) = problems(write(tmp_path / "a.jsonl", b"{\n" + lines(ROWS[:5])))
    assert "the file ends" not in problem


def test_number_that_is_too_long_for_python_is_a_bad_row(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path / "a.jsonl", b'{"source": ' + b"1" * 5000 + b', "target": "b"}\n' + lines()))
    assert "a.jsonl:1: " in problem


# --- tables


def test_places_in_a_table_count_the_lines_of_its_cells(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'source,target\n"a\nb",c\n\nd\n"e\r\nf","g"\n"h",""\n')
    source = opened(path)
    assert texts(source, [2, 0]) == [("e\r\nf", "g"), ("a\nb", "c")]
    assert [problem.split(": ", 1) for problem in problems(path)] == [
        [f"{path}:5", "1 fields, the header names 2"],
        [f"{path}:8", "the target is empty"],
    ]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_random_cells_come_back(kind: str, tmp_path: Path) -> None:
    random_ = random.Random(2)
    alphabet = ["a", "ü", "三", ",", "\t", ";", '"', "\n", "\r\n", " ", "'", "\\", "\u2028"]
    rows = [
        ("".join(random_.choices(alphabet, k=random_.randrange(12))), "t" + "".join(random_.choices(alphabet, k=5)))
        for _ in range(300)
    ]
    path = tmp_path / f"a.{kind}"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter="," if kind == "csv" else "\t")
        writer.writerows([("source", "target"), *rows])
    source = opened(path)
    assert texts(source, list(range(len(source)))) == rows


@pytest.mark.parametrize("text", ["source,target\ra,b\rc,d\r", "source,target\na\rb,c\nd,e\n"])
def test_bare_carriage_returns_in_a_table_end_in_rows_or_in_a_refusal(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", text)
    try:
        rows = [(example.source, example.target) for example in opened(path, on_bad_row="skip")]
    except ConfigError as error:
        assert "a.csv" in str(error)
    else:
        assert rows[-1] in [("c", "d"), ("d", "e")]


def test_large_cells_are_read_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(write(tmp_path / "a.csv", "source,target\n" + "a" * 200_000 + ",b\n"))
    kept = pickle.dumps(source)
    assert texts(source, [0]) == [("a" * 200_000, "b")]
    before = csv.field_size_limit(131072)  # as it is in a new process
    try:
        assert texts(pickle.loads(kept), [0]) == [("a" * 200_000, "b")]
    finally:
        csv.field_size_limit(before)


@pytest.mark.parametrize("head", ["\nsource,target\n", "\r\n\r\nsource,target\r\n", '"source","target"\n'])
def test_header_behind_blank_lines_or_in_quotes(head: str, tmp_path: Path) -> None:
    assert texts(opened(write(tmp_path / "a.csv", head + "a,b\n")), [0]) == [("a", "b")]


def test_header_that_spans_lines(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "a.csv", '"the\nsource",target\na,b\n'), source="{the\nsource}")
    assert texts(source, [0]) == [("a", "b")]


# --- damage


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("packing", ["gz", "zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_truncated_file_tells_how_many_rows_are_readable(name: str, packing: str, policy: str, tmp_path: Path) -> None:
    random_ = random.Random(3)
    rows = [(random_.randbytes(400).hex(), "t") for _ in range(500)]  # hardly compressible: several blocks
    plain = lines(rows) if name == "a.jsonl" else table(rows).replace(b"\nmore", b"")
    packed = gzip.compress(plain) if packing == "gz" else frames(plain, 4)
    message = refusal(write(tmp_path / f"{name}.{packing}", packed[: len(packed) * 2 // 3]), on_bad_row=policy)
    assert "truncated, the end of the stream is missing" in message
    readable = int(message.split(" rows before")[0].rsplit(" ", 1)[1])
    assert 100 < readable < 400


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_file_cut_at_every_byte_is_refused(packing: str, tmp_path: Path) -> None:
    packed = gzip.compress(lines(ROWS[:3])) if packing == "gz" else frames(lines(ROWS[:3]), 2)
    whole = frames(lines(ROWS[:3])[: -(-len(lines(ROWS[:3])) // 2)], 1)
    for end in range(5, len(packed)):
        if packing == "zst" and end == len(whole):
            continue  # between two frames: nothing tells that there was a second
        assert "damaged" in refusal(write(tmp_path / f"a.jsonl.{packing}", packed[:end])), end


@pytest.mark.parametrize("tail", [b"garbage", b"\x1f\x8bxx"])
def test_bytes_behind_a_packed_file(tail: bytes, tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "a.jsonl.gz", gzip.compress(lines()) + tail))
    assert "damaged gzip" in message
    assert "200 rows before it are readable" in message


def test_wrong_checksum_in_gzip(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(lines()))
    packed[-6] ^= 1
    assert "damaged gzip" in refusal(write(tmp_path / "a.jsonl.gz", bytes(packed)))


def test_damaged_packing_around_parquet_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"source": ["s"] * 99, "target": ["t"] * 99})
    packed = gzip.compress((tmp_path / "a.parquet").read_bytes())
    assert "gzip" in refusal(write(tmp_path / "b.parquet.gz", packed[:-20]))
    assert len(opened(write(tmp_path / "c.parquet.gz", packed))) == 99


def test_zstd_with_a_long_window(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)  # as `zstd --long=28` makes
    work = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = write(tmp_path / "a.jsonl.zst", work.compress(lines()) + work.flush())
    assert texts(opened(path), [199]) == [ROWS[199]]


def test_zstd_with_a_skippable_frame(tmp_path: Path) -> None:
    frame = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"  # as `pzstd` begins its files
    for content in (frame + frames(lines(), 2), frames(lines(), 2) + frame):
        assert texts(opened(write(tmp_path / "a.jsonl.zst", content)), [199]) == [ROWS[199]]


def test_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "a.parquet",
        {"source": [str(n) * 50 for n in range(900)], "target": ["t"] * 900},
        row_group_size=300,
        use_dictionary=False,
        compression="snappy",
    )
    content = bytearray(path.read_bytes())
    at = len(content) // 2
    content[at : at + 200] = bytes(200)
    path.write_bytes(bytes(content))
    assert "a.parquet: row group 2 cannot be read" in refusal(path)


def test_parquet_text_that_is_not_utf_8_is_a_bad_row(tmp_path: Path) -> None:
    raw = pyarrow.array([b"a", b"caf\xe9", b"b"])
    path = parquet(tmp_path / "a.parquet", {"source": raw.view(pyarrow.string()), "target": ["x", "y", "z"]})
    (problem,) = problems(path)
    assert "a.parquet:row 2" in problem
    assert "UTF-8" in problem


@pytest.mark.parametrize(
    "other",
    [
        pyarrow.array([2**60, 0], pyarrow.timestamp("us")),
        pyarrow.array([10**18 + 1, 0], pyarrow.timestamp("ns")),
        pyarrow.array([b"\xe9", b""]).view(pyarrow.string()),
        pyarrow.array([{"x": [1]}, None]),
    ],
    ids=["beyond dates", "nanoseconds", "not UTF-8", "nested"],
)
def test_columns_that_no_template_names_are_left_alone(other: pyarrow.Array, tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"other": other, "source": ["a", "b"], "target": ["c", "d"]})
    assert texts(opened(path), [1, 0]) == [("b", "d"), ("a", "c")]


def test_parquet_types_that_hold_text(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "a.parquet",
        {
            "source": pyarrow.array(["a", "b", "a"]).dictionary_encode(),
            "target": pyarrow.array(["x", "y", "z"], pyarrow.large_string()),
        },
    )
    assert texts(opened(path), [2, 0, 1]) == [("a", "z"), ("a", "x"), ("b", "y")]


def test_parquet_without_rows(tmp_path: Path) -> None:
    columns = {"source": pyarrow.array([], pyarrow.string()), "target": pyarrow.array([], pyarrow.string())}
    assert len(opened(parquet(tmp_path / "a.parquet", columns))) == 0


# --- folders of datasets


def test_folder_with_splits_wants_one_of_them(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"source": ["s"], "target": ["t"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "both"))
    message = refusal(tmp_path / "both")
    assert "holds the splits train, test" in message
    assert f"{tmp_path / 'both'}/train" in message
    assert texts(opened(tmp_path / "both" / "train"), [0]) == [("s", "t")]


def test_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain" / "a.jsonl", lines())
    message = refusal(tmp_path / "plain")
    assert "no data set saved by datasets" in message
    assert "*.jsonl" in message


def test_bad_row_of_a_folder_has_a_number(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"source": ["s", None], "target": ["t", "u"]})
    rows.save_to_disk(str(tmp_path / "saved"))
    assert "saved:row 2: no value for column source" in problems(tmp_path / "saved")[0]
