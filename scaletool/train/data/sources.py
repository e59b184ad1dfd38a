"""Read (source, target) texts from files, one row at a time, with the place of every bad row."""

from __future__ import annotations

import ast
import csv
import glob
import gzip
import json
import string
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from scaletool.errors import ConfigError

STDLIB = "stdlib"
FORMATS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_ROWS_PER_READ = 4096


@dataclass(frozen=True)
class Example:
    """One training pair; `row` is its number in the source order, bad rows counted in."""

    row: int
    source: str
    target: str


@dataclass
class BadRows:
    """What `data.on_bad_row: skip` left out: the count and the first case."""

    count: int = 0
    first: str | None = None

    def note(self, problem: str) -> None:
        self.count += 1
        self.first = self.first or problem


class BadRow(Exception):
    """A row that cannot be used; the text names file, line and problem."""


def find_files(patterns: Sequence[str], key: str) -> list[Path]:
    """The files behind paths and globs, in the given order. Raises ConfigError for one that matches nothing."""
    files: list[Path] = []
    for pattern in patterns:
        matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))] or [Path(pattern)]
        for path in matches:
            if not path.is_file():
                raise ConfigError(
                    f"data file {pattern} does not exist", where=key, hint=f"looked from {Path.cwd()}; globs are fine"
                )
            if _format(path) not in FORMATS:
                raise ConfigError(
                    f"data file {path} has no known ending",
                    where=key,
                    hint="known: " + " ".join(FORMATS) + ", also .gz",
                )
        files += matches
    return files


@dataclass
class Source:
    """Files (or the embedded pairs) read through two templates, the same way every time."""

    patterns: Sequence[str]
    source_template: str
    target_template: str
    on_bad_row: str
    key: str = "data.train"
    bad_rows: BadRows = field(default_factory=BadRows)

    def __iter__(self) -> Iterator[Example]:
        """Yield the usable examples. Raises ConfigError at the first bad row unless told to skip."""
        for row, entry in enumerate(self._entries()):
            try:
                if isinstance(entry, BadRow):
                    raise entry
                place, columns = entry
                source = _fill(self.source_template, columns, place)
                yield Example(row, source, _fill(self.target_template, columns, place))
            except BadRow as problem:
                if self.on_bad_row == "error":
                    raise ConfigError(
                        str(problem), where=self.key, hint="mend the file, or set data.on_bad_row: skip"
                    ) from None
                self.bad_rows.note(str(problem))

    def _entries(self) -> Iterator[tuple[str, dict[str, Any]] | BadRow]:
        if list(self.patterns) == [STDLIB]:
            yield from (("the standard library", pair) for pair in stdlib_pairs())
            return
        for path in find_files(self.patterns, self.key):
            yield from _read(path)


def stdlib_pairs() -> Iterator[dict[str, str]]:
    """Pairs from this machine's Python standard library: a function without its docstring, and the docstring's
    first paragraph. About 6,000 pairs of real, ragged text that need no network."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"} & set(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue  # files that this interpreter itself would not import
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (docstring := ast.get_docstring(node)):
                first, last = node.body[0].lineno, node.body[0].end_lineno
                body = lines[node.lineno - 1 : first - 1] + lines[last : node.end_lineno]
                yield {"source": "\n".join(body), "target": docstring.split("\n\n")[0]}


def stdlib_version() -> str:
    """What the embedded pairs depend on."""
    return f"{sys.version} {sysconfig.get_paths()['stdlib']}"


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return (suffixes[:-1] if suffixes[-1:] == [".gz"] else suffixes)[-1:][0] if suffixes and suffixes != [".gz"] else ""


def _fill(template: str, columns: dict[str, Any], place: str) -> str:
    for _, name, _, _ in string.Formatter().parse(template):
        if name is None:
            continue
        if name not in columns or columns[name] is None:
            have = ", ".join(str(column) for column in columns) or "none"
            raise BadRow(f"{place}: no value for column {name} (columns: {have})")
        if not isinstance(columns[name], str):
            raise BadRow(
                f"{place}: column {name} is {type(columns[name]).__name__} {columns[name]!r:.40}, expected text"
            )
    text = template.format_map(columns)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half a surrogate pair, UTF-8 cannot
        raise BadRow(f"{place}: half a surrogate pair, {text[error.start]!a}, at character {error.start + 1}") from None
    return text


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]] | BadRow]:
    kind = _format(path)
    if kind == ".parquet":
        yield from _read_parquet(path)
        return
    with _open(path) as stream:
        try:
            yield from _read_table(path, stream, kind) if kind in (".csv", ".tsv") else _read_json_lines(path, stream)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"{path}: damaged gzip: {error}", hint="the file is cut off or not gzip") from None


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as stream:
        packed = stream.read(2) == GZIP_MAGIC  # by content: endings lie
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def _read_json_lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, dict[str, Any]] | BadRow]:
    for number, raw in enumerate(stream, start=1):
        place = f"{path}:{number}"
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.lstrip()[:1] == b"[":
                raise ConfigError(f"{path} is one JSON array", where=place, hint="write one JSON object per line")
        if not raw.strip():
            continue
        try:
            columns = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield BadRow(f"{place}: byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8")
        except json.JSONDecodeError as error:
            yield BadRow(f"{place}: not valid JSON: {error.msg} at column {error.colno}")
        else:
            yield (place, columns) if isinstance(columns, dict) else BadRow(f"{place}: not a JSON object")


def _read_table(path: Path, stream: IO[bytes], kind: str) -> Iterator[tuple[str, dict[str, Any]] | BadRow]:
    csv.field_size_limit(2**31 - 1)
    text = _decoded(path, stream)
    head = next(text, "")
    delimiter = "\t" if kind == ".tsv" else max(",;\t|", key=head.count)
    names = next(csv.reader([head], delimiter=delimiter), [])
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{path}: column {', '.join(sorted(repeated))} is named twice", where=f"{path}:1")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        place = f"{path}:{reader.line_num + 2}"
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ConfigError(f"{place}: cannot be read as CSV: {error}", where=place) from None
        if not values:
            continue
        if len(values) != len(names):
            yield BadRow(f"{place}: {len(values)} fields, the header names {len(names)}")
        else:
            yield place, dict(zip(names, values, strict=True))


def _decoded(path: Path, stream: IO[bytes]) -> Iterator[str]:
    """The lines of a file, line ends kept; a text stream would decode ahead and not know the line of a bad byte."""
    for number, raw in enumerate(stream, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte {raw[error.start]:#04x} at column {error.start + 1}"
            raise ConfigError(f"{path}:{number}: {byte} is not UTF-8", where=f"{path}:{number}") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]] | BadRow]:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches(PARQUET_ROWS_PER_READ):
            for columns in batch.to_pylist():
                number += 1
                yield f"{path}:row {number}", columns
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path}: not readable as Parquet: {error}") from None
