"""`scaletool data inspect`: what is wrong is named with its place, and what is right is left alone."""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from scaletool.config import DataConfig
from scaletool.train.data import __main__ as command
from scaletool.train.data.inspect import imbalance, padding_share

Inspect = Callable[..., tuple[int, str]]
WORDS = "river lantern quiet seven market orange window climbs under paper slowly".split()


def pairs(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of like lengths, no two the same."""
    choose = random.Random(seed)
    return [
        {
            "source": f"shorten: {' '.join(choose.choices(WORDS, k=9))} {seed}.{row}",
            "target": f"{choose.choice(WORDS)} {row}",
        }
        for row in range(rows)
    ]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


@pytest.fixture
def inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inspect:
    """Exit status and output, the two streams together, of the command in the folder of the files."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["data", "inspect", *arguments])
        status = command.main()
        return status, "".join(capsys.readouterr())

    return run


def findings(output: str) -> str:
    return "\n".join(line for line in output.splitlines() if re.match(r"(error|warning|note|  hint): ?", line))


def changed(rows: list[dict[str, Any]], changes: dict[int, bytes]) -> bytes:
    lines = jsonl(rows).splitlines(keepends=True)
    for line, content in changes.items():
        lines[line - 1] = content + b"\n"
    return b"".join(lines)


# --- what is right


RIGHT: dict[str, tuple[str, bytes, int]] = {
    "plain": ("a.jsonl", jsonl(pairs(64)), 64),
    "gzip": ("a.jsonl.gz", gzip.compress(jsonl(pairs(12))), 12),
    "byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + jsonl(pairs(12)), 12),
    "blank lines": ("a.jsonl", b"\n" + jsonl(pairs(12)).replace(b"\n", b"\n\n"), 12),
    "separators of Unicode": (
        "a.jsonl",
        jsonl([*pairs(12), {"source": "one\u2028two\x85three", "target": "four\u2029five"}]),
        13,
    ),
    "csv": (
        "a.csv",
        b"source,target\r\n" + b"".join(b'"one, ""two""\r\nthree %d",four\r\n' % row for row in range(7)),
        7,
    ),
    "tsv": ("a.tsv", b"source\ttarget\n" + b"".join(b"one, %d\ttwo\n" % row for row in range(7)), 7),
    "no last newline": ("a.jsonl", jsonl(pairs(12))[:-1], 12),
}


@pytest.mark.parametrize(("name", "content", "rows"), RIGHT.values(), ids=RIGHT)
def test_right_files_have_no_findings(name: str, content: bytes, rows: int, inspect: Inspect) -> None:
    Path(name).write_bytes(content)
    status, output = inspect(name)
    assert status == 0
    assert f"{name}: {rows} rows" in output
    assert findings(output) == ""


def test_parquet_with_dictionary_and_large_strings(inspect: Inspect) -> None:
    source = pyarrow.array(["one", "two", "three", "one"]).dictionary_encode()
    target = pyarrow.array(["eins", "zwei", "drei", "ein"], pyarrow.large_string())
    pyarrow.parquet.write_table(pyarrow.table({"source": source, "target": target}), "a.parquet")
    assert inspect("a.parquet")[0] == 0
    assert findings(inspect("a.parquet")[1]) == ""


def test_validation_may_be_smaller_than_the_shards_of_training(inspect: Inspect) -> None:
    for seed, (name, rows) in enumerate({"train-0.jsonl": 40, "train-1.jsonl": 40, "valid.jsonl": 10}.items()):
        Path(name).write_bytes(jsonl(pairs(rows, seed)))
    Path("run.yaml").write_text("data: {train: train-*.jsonl, validation: valid.jsonl}")
    for arguments in (["train-0.jsonl", "valid.jsonl"], ["run.yaml"]):
        status, output = inspect(*arguments)
        assert (status, findings(output)) == (0, "")


# --- what training would refuse


WRONG: dict[str, tuple[str, bytes, str]] = {
    "truncated gzip": ("a.jsonl.gz", gzip.compress(jsonl(pairs(900)))[:-2000], r"gzip.*truncated.*\d+ rows before it"),
    "latin-1": ("a.jsonl", changed(pairs(11), {6: b'{"source": "caf\xe9", "target": "b"}'}), r"a\.jsonl:6: .*UTF-8"),
    "array": ("a.json", json.dumps(pairs(10)).encode(), r"one JSON array[\s\S]*one JSON object per line"),
    "no value": (
        "a.jsonl",
        changed(
            pairs(20), {8: b'{"source": "a"}', 12: b'{"src": "a", "tgt": "b"}', 14: b'{"source": "a", "target": null}'}
        ),
        r"3 bad rows: a\.jsonl:8: no value for column target.*a\.jsonl:12: .*a\.jsonl:14: ",
    ),
    "empty targets": (
        "a.jsonl",
        changed(pairs(20), {5: b'{"source": "a", "target": ""}', 16: b'{"source": "a", "target": "\\u200b"}'}),
        r"2 bad rows: a\.jsonl:5: the target is empty; a\.jsonl:16: the target is empty",
    ),
    "types": (
        "a.jsonl",
        changed(pairs(8), {2: b'{"source": "a", "target": 42}', 3: b'{"source": [], "target": "b"}'}),
        r"a\.jsonl:2: column target is int 42, expected text; a\.jsonl:3: column source is list",
    ),
    "merge markers": (
        "a.jsonl",
        b"<<<<<<< HEAD\n" + jsonl(pairs(2)) + b"=======\n" + jsonl(pairs(2, 1)) + b">>>>>>> other\n",
        r"3 bad rows: a\.jsonl:1: a merge conflict marker.*a\.jsonl:4: .*a\.jsonl:7: ",
    ),
    "cut last line": ("a.jsonl", jsonl(pairs(12))[:-20], r"1 bad row: a\.jsonl:12: not valid JSON.*truncated"),
    "empty": ("a.jsonl", b"", r"a\.jsonl is empty: no usable rows"),
    "only blank lines": ("a.jsonl", b"\n\n", r"a\.jsonl is empty: no usable rows"),
    "semicolons": (
        "a.csv",
        b"source;target\na;b\nc;d\ne;f\ng;h\n",
        r"delimiter is a semicolon[\s\S]*data\.delimiter: ';'",
    ),
    "UTF-16": ("a.jsonl", jsonl(pairs(5)).decode().encode("utf-16"), r"is UTF-16"),
    "no known content": ("a.txt", b"some text\n", r"no known ending"),
}


@pytest.mark.parametrize(("name", "content", "pattern"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_named_with_the_place(name: str, content: bytes, pattern: str, inspect: Inspect) -> None:
    Path(name).write_bytes(content)
    status, output = inspect(name)
    assert status == 2
    assert re.search(rf"error: .*{pattern}", findings(output)), output
    assert "Traceback" not in output


@pytest.mark.parametrize("kind", ["latin-1", "no value", "empty targets", "types", "merge markers", "cut last line"])
def test_bad_rows_are_a_warning_where_they_are_skipped(kind: str, inspect: Inspect) -> None:
    name, content, pattern = WRONG[kind]
    Path(name).write_bytes(content)
    status, output = inspect(name, "--set", "data.on_bad_row=skip")
    assert status == 0
    assert re.search(rf"warning: .*{pattern}", findings(output)), output


def test_parquet_with_nulls(inspect: Inspect) -> None:
    columns = {"source": ["a", "b", None, "d", "e", "f"], "target": ["x", None, "z", "", "v", "w"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), "a.parquet")
    status, output = inspect("a.parquet")
    assert status == 2
    assert "3 bad rows: a.parquet:row 2: no value for column target" in output
    assert "a.parquet:row 4: the target is empty" in output


def test_one_wrong_file_does_not_hide_the_others(inspect: Inspect) -> None:
    Path("good.jsonl").write_bytes(jsonl(pairs(9)))
    Path("bad.json").write_bytes(b"[1]")
    content = bytearray(b"PAR1" + bytes(50) + b"PAR1")
    Path("bad.parquet").write_bytes(bytes(content))
    status, output = inspect("bad.json", "good.jsonl", "bad.parquet", "gone.jsonl")
    assert status == 2
    assert "good.jsonl: 9 rows" in output
    for problem in ("one JSON array", "bad.parquet: not readable as Parquet", "gone.jsonl does not exist"):
        assert problem in output


@pytest.mark.parametrize(
    "name", ["gone.jsonl", "gone-*.jsonl", "{folder}/gone.jsonl", "{folder}/gone-*.jsonl", "no-such"]
)
def test_nothing_there(name: str, inspect: Inspect, tmp_path: Path) -> None:
    status, output = inspect(name.format(folder=tmp_path))
    assert status == 2
    assert "error: " in output
    assert name.format(folder=tmp_path) in output


def test_without_files_the_usage_is_told(inspect: Inspect) -> None:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(inspect()[0])  # argparse ends by itself
    assert end.value.code == 2


# --- what is worth a look


def test_gzip_under_a_plain_name(inspect: Inspect) -> None:
    Path("a.jsonl").write_bytes(gzip.compress(jsonl(pairs(12))))
    status, output = inspect("a.jsonl")
    assert status == 0
    assert "a.jsonl: 12 rows" in output
    assert "warning: a.jsonl is gzip data under another ending" in output
    assert "rename or unpack" in output


def test_fewer_rows_than_a_node_has_gpus(inspect: Inspect) -> None:
    Path("a.jsonl").write_bytes(jsonl(pairs(3)))
    status, output = inspect("a.jsonl")
    assert status == 0
    assert "3 rows are fewer than 4 processes" in findings(output)


def test_uneven_files(inspect: Inspect) -> None:
    for number, rows in enumerate((30, 4, 30)):
        Path(f"part-{number}.jsonl").write_bytes(jsonl(pairs(rows, number)))
    for arguments in (["part-0.jsonl", "part-1.jsonl", "part-2.jsonl"], ["part-*.jsonl"]):
        status, output = inspect(*arguments)
        assert status == 0
        assert "uneven numbers of rows: 30, 4, 30" in findings(output)
        assert "together: 64 rows" in output


def test_even_files_are_left_alone(inspect: Inspect) -> None:
    for number, rows in enumerate((30, 28, 31)):
        Path(f"part-{number}.jsonl").write_bytes(jsonl(pairs(rows, number)))
    status, output = inspect("part-*.jsonl")
    assert (status, findings(output)) == (0, "")


def test_texts_that_will_be_cut(inspect: Inspect) -> None:
    rows = pairs(12)
    rows[10]["source"], rows[11]["target"] = "word " * 800, "word " * 200
    Path("a.jsonl").write_bytes(jsonl(rows))
    status, output = inspect("a.jsonl")
    assert status == 0
    assert "1 of 12 rows (8.3%) are cut at data.max_source_tokens 256; the longest has 4001 tokens" in output
    assert "1 of 12 rows (8.3%) are cut at data.max_target_tokens 64; the longest has 1001 tokens" in output
    limits = ("--set", "data.max_source_tokens=4001", "--set", "data.max_target_tokens=1001")
    assert findings(inspect("a.jsonl", *limits)[1]) == ""


def test_rows_that_two_files_share(inspect: Inspect) -> None:
    Path("train.jsonl").write_bytes(jsonl(pairs(32)))
    Path("valid.jsonl").write_bytes(jsonl(pairs(8, 1) + pairs(32)[:8]))
    status, output = inspect("train.jsonl", "valid.jsonl")
    assert status == 0
    assert "warning: 8 rows of valid.jsonl are also in train.jsonl: overlap" in output


def test_duplicates_in_one_file(inspect: Inspect) -> None:
    Path("a.jsonl").write_bytes(jsonl(pairs(20) + pairs(20)[:3]))
    status, output = inspect("a.jsonl")
    assert status == 0
    assert "warning: 3 rows are exact duplicates of others" in output


# --- the report


def test_report_as_json(inspect: Inspect) -> None:
    rows = pairs(40)
    rows[7]["target"] = ""
    Path("a.jsonl").write_bytes(jsonl(rows))
    status, output = inspect("a.jsonl", "--json")
    report = json.loads(output)
    assert status == 2
    assert report["files"] == [{"file": "a.jsonl", "rows": 39, "bad_rows": 1}]
    assert [finding["severity"] for finding in report["findings"]] == ["error"]
    lengths = sorted(len(row["source"].encode()) + 1 for row in rows)
    assert report["tokens"]["source"]["max"] == lengths[-1]
    assert report["tokens"]["source"]["cut_share"] == 0
    assert lengths[0] <= report["tokens"]["source"]["p50"] <= report["tokens"]["source"]["p99"] <= lengths[-1]
    assert set(report["padding_share"]) == {"padded", "bucketed", "packed"}
    assert all(0 <= share < 1 for share in report["padding_share"].values())


def test_report_of_no_row_is_json_too(inspect: Inspect) -> None:
    Path("a.jsonl").touch()
    status, output = inspect("a.jsonl", "--json")
    assert (status, json.loads(output)["rows"]) == (2, 0)


def test_run_config_names_the_files(inspect: Inspect, tmp_path: Path) -> None:
    Path("train.csv").write_bytes(b"q;a\n" + b"".join(b"one %d;two\n" % row for row in range(9)))
    Path("valid.csv").write_bytes(b"q;a\n" + b"".join(b"three %d;two\n" % row for row in range(5)))
    keys = {"train": "train.csv", "validation": "valid.csv", "source": "{q}", "target": "{a}", "delimiter": ";"}
    Path("run.yaml").write_text(json.dumps({"data": keys}))
    status, output = inspect("run.yaml")
    assert status == 0
    assert "train.csv: 9 rows" in output
    assert "valid.csv: 5 rows" in output
    assert findings(output) == ""
    status, output = inspect("run.yaml", "--set", "data.max_source_tokens=0")
    assert status == 2
    assert "data.max_source_tokens is 0" in output


LENGTHS = np.minimum(np.random.default_rng(0).lognormal(4.0, 0.9, (2, 3000)).astype(np.int32) + 1, [[256], [64]])


def test_padding_falls_from_padded_to_bucketed_to_packed() -> None:
    padded, bucketed, packed = (
        padding_share(*LENGTHS, batching=name, data=DataConfig()) for name in ("padded", "bucketed", "packed")
    )
    assert padded > 0.4
    assert bucketed < 0.3
    assert packed < bucketed


@pytest.mark.parametrize("batching", ["padded", "bucketed", "packed"])
def test_imbalance_is_the_busiest_over_the_mean(batching: str) -> None:
    assert imbalance(*LENGTHS, batching=batching, data=DataConfig(), ranks=1) == 1.0
    found = imbalance(*LENGTHS, batching=batching, data=DataConfig(), ranks=4)
    assert 1.0 <= found < {"padded": 1.5, "bucketed": 1.1, "packed": 1.1}[batching]
    equal = np.full((2, 400), 8, dtype=np.int32)
    assert imbalance(*equal, batching=batching, data=DataConfig(), ranks=2) == pytest.approx(1.0, abs=0.05)
