"""The rows of one file by number, whatever its format: read in order to be tokenised, or anywhere by a stream.

A reader is opened once over a file, which finds where every row begins; after that any row is a seek away. Text files
are indexed by byte (two numbers a row), Parquet files by row group.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from scaletool.errors import ConfigError
from scaletool.train.data.unpacking import PACKED_ENDINGS, packing_of, unpack

FORMATS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
UTF8_MARK = b"\xef\xbb\xbf"
MERGE_MARKERS = (b"<<<<<<<", b"=======", b">>>>>>>", b"|||||||")
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
ROW_GROUPS_KEPT = 8  # decoded row groups that a reader holds on to


class BadRow(Exception):
    """A row that cannot be used; the text names file, line and problem."""


Row = tuple[str, dict[str, Any]] | BadRow
"""Where a row stands (file:line) and its columns, or what is wrong with it."""


class Reader(Protocol):
    """Rows of one file. `notes` are remarks that a user should see once."""

    notes: list[str]

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int]) -> list[Row]:
        """The rows of these numbers, from 0."""
        ...

    def sizes(self) -> np.ndarray:
        """int64, shape (rows,): about how many bytes each holds, as a measure of its length."""
        ...


def open_reader(path: Path, folder: Path, columns: Sequence[str], delimiter: str | None = None) -> Reader:
    """The reader for a file, known by content before ending.

    folder: takes indexes and what has to be unpacked. columns: what rows will be asked for. Raises ConfigError where
    the file cannot be read.
    """
    if path.is_dir():
        return FolderRows(path)
    with path.open("rb") as stream:
        head = stream.read(4096)
    packing = packing_of(head)
    ending = ending_of(path)
    notes, damage = [], None
    plain = path
    reader: Any = None
    if packing:
        if PACKED_ENDINGS.get(path.suffix.lower()) != packing:
            notes.append(
                f"{path} is {packing} data under another ending: other tools may not read it; rename or unpack"
            )
        plain, damage = unpack(path, packing, folder)
        with plain.open("rb") as stream:
            head = stream.read(4096)
    try:
        reader = _reader(plain, path, folder, head, columns, delimiter)
    except ConfigError:
        if not damage:
            raise
    if damage:
        whole = f"; {len(reader)} rows before it are readable" if reader is not None else ""
        hint = "fetch the file again, or unpack what is readable by hand"
        raise ConfigError(f"{path}: {damage}{whole}", where=str(path), hint=hint)
    assert reader is not None
    if ending in FORMATS and ending not in reader.endings:
        notes.append(f"{path} holds {reader.kind}, not what its ending says")
    reader.notes = notes + reader.notes
    return reader


def _reader(plain: Path, path: Path, folder: Path, head: bytes, columns: Sequence[str], delimiter: str | None) -> Any:
    """plain: the unpacked file, head: its beginning."""
    ending = ending_of(path)
    if head.startswith(UTF16_MARKS):
        raise ConfigError(f"{path} is UTF-16 text", where=f"{path}:1", hint="convert it to UTF-8")
    if head.startswith(b"PAR1") or ending == ".parquet":
        return ParquetRows(plain, path, columns)
    is_json_lines = head.removeprefix(UTF8_MARK).lstrip().startswith(b"{")
    if ending in (".csv", ".tsv") and not is_json_lines:
        return TableRows(plain, path, folder, ending, delimiter)
    if ending not in FORMATS and not is_json_lines:
        raise ConfigError(
            f"data file {path} has no known ending, and its content is no JSON lines",
            hint="known: " + " ".join([*FORMATS, *PACKED_ENDINGS]),
        )
    return LineRows(plain, path, folder)


def ending_of(path: Path) -> str:
    """The ending that names the format: `.jsonl` of `a.jsonl.gz`, empty for none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED_ENDINGS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


class _TextRows:
    """A text file with the place of every row: byte and line where it starts."""

    def __init__(self, plain: Path, path: Path, folder: Path) -> None:
        self.plain, self.path = plain, path
        self.notes: list[str] = []
        self.size = plain.stat().st_size
        self._index_path = folder / "index.npy"
        index = np.fromiter(self._index(), dtype=np.dtype((np.int64, 2)))
        np.save(self._index_path, np.ascontiguousarray(index.T))
        self._open()

    def _open(self) -> None:
        self.starts, self.lines = np.load(self._index_path, mmap_mode="r")
        self._stream: IO[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("starts", "lines", "_stream")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()  # every process maps the index and opens the file for itself

    def __len__(self) -> int:
        return len(self.starts)

    def sizes(self) -> np.ndarray:
        return np.diff(self.starts, append=self.size)

    def read(self, rows: Sequence[int]) -> list[Row]:
        if self._stream is None:
            self._stream = self.plain.open("rb")
        found = []
        for row in rows:
            end = self.starts[row + 1] if row + 1 < len(self.starts) else self.size
            self._stream.seek(self.starts[row])
            found.append(self._parse(self._stream.read(end - self.starts[row]), int(self.lines[row])))
        return found

    def _index(self) -> Iterator[tuple[int, int]]:
        """(byte, line from 1) of every row."""
        raise NotImplementedError

    def _parse(self, raw: bytes, line: int) -> Row:
        raise NotImplementedError

    def _decode(self, raw: bytes, line: int) -> str:
        """Raises BadRow with the place of the first byte that is not UTF-8."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            before = raw[: error.start]
            place = f"{self.path}:{line + before.count(10)}"
            column = error.start - before.rfind(b"\n")
            raise BadRow(
                f"{place}: byte {raw[error.start]:#04x} at column {column} is not UTF-8; convert it (latin-1?)"
            ) from None


class LineRows(_TextRows):
    """JSON lines. Blank lines are no rows."""

    kind, endings = "JSON lines", (".jsonl", ".json", ".ndjson")

    def _index(self) -> Iterator[tuple[int, int]]:
        with self.plain.open("rb") as stream:
            head = stream.read(64).removeprefix(UTF8_MARK)
            if head.lstrip()[:1] == b"[":
                raise ConfigError(
                    f"{self.path} is one JSON array", where=f"{self.path}:1", hint="write one JSON object per line"
                )
            stream.seek(0)
            start = 0
            for number, raw in enumerate(stream, start=1):
                if raw.strip() and raw.strip() != UTF8_MARK:
                    yield start, number
                start += len(raw)

    def _parse(self, raw: bytes, line: int) -> Row:
        place = f"{self.path}:{line}"
        # Blank lines before the next row belong to the slice, a byte order mark to the first.
        text = raw.removeprefix(UTF8_MARK).strip()
        try:
            columns = json.loads(self._decode(text, line))
        except BadRow as problem:
            return problem
        except json.JSONDecodeError as error:
            if text.startswith(MERGE_MARKERS):
                return BadRow(f"{place}: a merge conflict marker, {text[:20].decode('utf-8', 'replace')!r}")
            cut = "" if raw.endswith(b"\n") else "; the file ends inside this row: truncated"
            return BadRow(f"{place}: not valid JSON: {error.msg} at column {error.colno}{cut}")
        except RecursionError:
            return BadRow(f"{place}: not valid JSON: nested too deeply")
        except ValueError as error:  # a number of thousands of digits
            return BadRow(f"{place}: not readable as JSON: {error}")
        return (place, columns) if isinstance(columns, dict) else BadRow(f"{place}: not a JSON object")


class TableRows(_TextRows):
    """CSV and TSV with a header; a row may span lines."""

    kind, endings = "a table", (".csv", ".tsv")

    def __init__(self, plain: Path, path: Path, folder: Path, ending: str, delimiter: str | None) -> None:
        with plain.open("rb") as stream:
            first = next((line for line in stream if line.removeprefix(UTF8_MARK).strip()), b"")
        head = first.decode("utf-8", "replace")
        usual = "\t" if ending == ".tsv" else ","
        seen = max(DELIMITERS, key=lambda mark: (head.count(mark), mark == usual))
        if delimiter is None and head.count(usual) == 0 and head.count(seen) > 0:
            raise ConfigError(
                f"{path}: the delimiter is a {DELIMITERS[seen]}, {ending} means a {DELIMITERS[usual]}",
                where=f"{path}:1",
                hint=f"set data.delimiter: {seen!r}, or name the file otherwise",
            )
        self.delimiter = delimiter or usual
        self.names: list[str] = []
        super().__init__(plain, path, folder)

    def _open(self) -> None:
        csv.field_size_limit(2**31 - 1)  # of the process: its default takes a long document for an error
        super()._open()

    def _index(self) -> Iterator[tuple[int, int]]:
        csv.field_size_limit(2**31 - 1)
        records = self._records()
        _, line, header = next(records, (0, 1, []))
        if header is None:
            raise ConfigError(f"{self.path}: its header cannot be read as CSV", where=f"{self.path}:{line}")
        self.names = header
        if repeated := {name for name in header if header.count(name) > 1}:
            names = ", ".join(sorted(repeated))
            raise ConfigError(f"{self.path}: column {names} is named twice", where=f"{self.path}:{line}")
        for start, line, _ in records:
            yield start, line

    def _records(self) -> Iterator[tuple[int, int, list[str] | None]]:
        """(byte, line, values) of every record that is not blank; None for values that cannot be told apart."""
        consumed = 0

        def lines() -> Iterator[str]:
            nonlocal consumed
            for raw in stream:
                consumed += len(raw)
                text = raw.decode("utf-8", "surrogateescape")
                yield text.removeprefix("\ufeff") if consumed == len(raw) else text

        with self.plain.open("rb") as stream:
            reader = csv.reader(lines(), delimiter=self.delimiter)
            while True:
                start, line = consumed, reader.line_num + 1
                try:
                    values: list[str] | None = next(reader)
                except StopIteration:
                    return
                except csv.Error:  # read by itself, the row will say what it is
                    values = None
                if values != []:
                    yield start, line, values

    def _parse(self, raw: bytes, line: int) -> Row:
        place = f"{self.path}:{line}"
        try:
            text = io.StringIO(self._decode(raw, line), newline="")
            values = next(csv.reader(text, delimiter=self.delimiter, strict=True))
        except BadRow as problem:
            return problem
        except csv.Error as error:
            return BadRow(f"{place}: cannot be read as CSV: {error}")
        if len(values) != len(self.names):
            return BadRow(f"{place}: {len(values)} fields, the header names {len(self.names)}")
        return place, dict(zip(self.names, values, strict=True))


class ParquetRows:
    """A Parquet file; its row groups are the pieces that are decoded."""

    kind, endings = "Parquet", (".parquet",)

    def __init__(self, plain: Path, path: Path, columns: Sequence[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self.plain, self.path, self.columns = plain, path, list(columns)
        self.notes: list[str] = []
        try:
            metadata = pyarrow.parquet.read_metadata(plain)
            names = metadata.schema.to_arrow_schema().names
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: not readable as Parquet: {error}") from None
        if missing := sorted(set(columns) - set(names)):
            raise ConfigError(f"{path}: no column {', '.join(missing)} (columns: {', '.join(names)})", where=str(path))
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self.ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        self._bytes = [group.total_byte_size / max(1, group.num_rows) for group in groups]
        self._open()

    def _open(self) -> None:
        self._group = lru_cache(ROW_GROUPS_KEPT)(self._decode)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def sizes(self) -> np.ndarray:
        counts = np.diff(self.ends, prepend=0)
        return np.repeat(np.array(self._bytes, dtype=np.int64), counts)

    def _decode(self, group: int) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.plain) as file:
                return file.read_row_group(group, columns=self.columns, use_threads=False)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{self.path}: row group {group + 1} cannot be read: {error}") from None

    def read(self, rows: Sequence[int]) -> list[Row]:
        found: list[Row] = []
        for group, run in itertools.groupby(rows, lambda row: int(np.searchsorted(self.ends, row, side="right"))):
            numbers = list(run)
            first = int(self.ends[group - 1]) if group else 0
            table = self._group(group).take([number - first for number in numbers])
            try:
                values: list[Any] = table.to_pylist()
            except (ValueError, OverflowError):  # one of them holds bytes that are no text
                values = [_values(table.slice(place, 1)) for place in range(len(numbers))]
            for number, entry in zip(numbers, values, strict=True):
                place = f"{self.path}:row {number + 1}"
                found.append((place, entry) if isinstance(entry, dict) else BadRow(f"{place}: {entry}"))
        return found


def _values(row: Any) -> dict[str, Any] | str:
    """Columns of a table of one row, or what is wrong with them."""
    try:
        values: dict[str, Any] = row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return f"byte {error.object[error.start]:#04x} is not UTF-8"
    except (ValueError, OverflowError) as error:
        return str(error)
    return values


class FolderRows:
    """A folder that `datasets.save_to_disk` wrote, or a split of a data set of the hub."""

    def __init__(self, path: Path | str, rows: Any = None) -> None:
        import datasets

        self.path, self.notes = path, list[str]()
        if rows is None:
            try:
                rows = datasets.load_from_disk(str(path))
            except (OSError, ValueError, KeyError) as error:
                raise ConfigError(
                    f"{path} is a folder, but no data set saved by datasets: {error}",
                    hint=f"give files: {path}/*.jsonl",
                ) from None
        if isinstance(rows, datasets.DatasetDict):
            raise ConfigError(f"{path} holds the splits {', '.join(rows)}", hint=f"name one: {path}/{next(iter(rows))}")
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def sizes(self) -> np.ndarray:
        return np.ones(len(self), dtype=np.int64)

    def read(self, rows: Sequence[int]) -> list[Row]:
        columns = self.rows[list(rows)]
        names = list(columns)
        values = zip(*columns.values(), strict=True)
        return [
            (f"{self.path}:row {row + 1}", dict(zip(names, entry, strict=True)))
            for row, entry in zip(rows, values, strict=True)
        ]
