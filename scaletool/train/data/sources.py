"""(source, target) texts from the files of a run config: templates filled, every bad row placed and counted."""

from __future__ import annotations

import ast
import glob
import hashlib
import json
import os
import string
import sys
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scaletool.config import HUB_NAME, DataConfig
from scaletool.errors import ConfigError
from scaletool.train.data.readers import BadRow, FolderRows, Reader, Row, open_reader

STDLIB = "stdlib"
ROWS_PER_READ = 4096


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


def find_files(patterns: Sequence[str], key: str) -> list[Path | str]:
    """The files, folders and names of hub data sets behind `patterns`, in the given order.

    Raises ConfigError for a pattern that matches nothing.
    """
    files: list[Path | str] = []
    for pattern in patterns:
        matches: list[Path | str] = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
        if not matches and Path(pattern).exists():  # a name with characters of a glob in it
            matches = [Path(pattern)]
        if not matches and HUB_NAME.fullmatch(pattern):
            matches = [pattern]
        if not matches:
            raise ConfigError(
                f"data file {pattern} does not exist", where=key, hint=f"looked from {Path.cwd()}; globs are fine"
            )
        files += matches
    return files


class Source:
    """The rows of all files, one behind the other, as pairs.

    folder: where indexes, unpacked files and the standard library's pairs go; it must outlive the source.
    readers: those of an earlier source over the same files and folder.
    Raises ConfigError for files that cannot be opened.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        data: DataConfig,
        folder: Path,
        key: str = "data.train",
        readers: list[Reader] | None = None,
    ) -> None:
        self.patterns, self.key = patterns, key
        self.templates = tuple((template, fields_of(template)) for template in (data.source, data.target))
        self.on_bad_row = data.on_bad_row
        self.bad_rows = BadRows()
        self.readers = readers if readers is not None else _readers(patterns, data, folder, key)
        self.ends = np.cumsum([len(reader) for reader in self.readers], dtype=np.int64)

    def __len__(self) -> int:
        """Rows, bad ones counted in."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def notes(self) -> list[str]:
        return [note for reader in self.readers for note in reader.notes]

    def sizes(self) -> np.ndarray:
        """int64, shape (rows,): the bytes of every row."""
        return np.concatenate([reader.sizes() for reader in self.readers])

    def read(self, rows: Sequence[int]) -> list[Example | BadRow]:
        """The pairs of these rows, or what is wrong with them, in the given order."""
        found: list[Example | BadRow] = []
        for reader, first, numbers in _runs(rows, self.ends):
            entries = self.readers[reader].read([number - first for number in numbers])
            found += [self._pair(number, entry) for number, entry in zip(numbers, entries, strict=True)]
        return found

    def __iter__(self) -> Iterator[Example]:
        """All usable pairs. Raises ConfigError at the first bad row unless told to skip."""
        for start in range(0, len(self), ROWS_PER_READ):
            yield from self.usable(self.read(range(start, min(start + ROWS_PER_READ, len(self)))))

    def usable(self, pairs: Iterable[Example | BadRow]) -> Iterator[Example]:
        """The policy `data.on_bad_row`: stop at a bad row, or count it and go on."""
        for pair in pairs:
            if isinstance(pair, Example):
                yield pair
            elif self.on_bad_row == "error":
                hint = "mend the file, or set data.on_bad_row: skip"
                raise ConfigError(str(pair), where=self.key, hint=hint)
            else:
                self.bad_rows.note(str(pair))

    def _pair(self, row: int, entry: Row) -> Example | BadRow:
        if isinstance(entry, BadRow):
            return entry
        place, columns = entry
        try:
            source, target = (_fill(template, fields, columns, place) for template, fields in self.templates)
        except BadRow as problem:
            return problem
        return BadRow(f"{place}: the target is empty") if is_blank(target) else Example(row, source, target)


def is_blank(text: str) -> bool:
    """True for nothing but spaces and characters without a shape (zero-width space and its like)."""
    return not text.strip() or all(char.isspace() or unicodedata.category(char) == "Cf" for char in text)


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


def content_of(patterns: Sequence[str], key: str = "data.train") -> list[str]:
    """A digest per file. The whole content counts: a file edited in place must not be taken for the old one."""
    if list(patterns) == [STDLIB]:
        return [stdlib_version()]
    digests = []
    for path in find_files(patterns, key):
        if isinstance(path, str):
            digests.append(path)
            continue
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        found = hashlib.sha256(str(path.suffixes).encode())
        for file in filter(Path.is_file, files):
            with file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    found.update(block)
        digests.append(found.hexdigest())
    return digests


def digest(settings: dict[str, Any]) -> str:
    """A short name for settings, the same in every process."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]


def _files(patterns: Sequence[str], key: str, folder: Path) -> list[Path | str]:
    if list(patterns) != [STDLIB]:
        return find_files(patterns, key)
    path = folder / "stdlib.jsonl"
    if not path.is_file():
        scratch = path.with_suffix(".tmp")
        with scratch.open("w", encoding="utf-8", errors="surrogatepass") as stream:
            stream.writelines(json.dumps(pair) + "\n" for pair in stdlib_pairs())
        os.replace(scratch, path)
    return [path]


def _readers(patterns: Sequence[str], data: DataConfig, folder: Path, key: str) -> list[Reader]:
    folder.mkdir(parents=True, exist_ok=True)
    readers = []
    for number, path in enumerate(_files(patterns, key, folder)):
        scratch = folder / str(number)  # two files of one name must not meet
        scratch.mkdir(exist_ok=True)
        readers.append(_open(path, scratch, data, key))
    return readers


def _open(path: Path | str, folder: Path, data: DataConfig, key: str) -> Reader:
    if isinstance(path, Path):
        try:
            return open_reader(path, folder, columns_of(data), data.delimiter)
        except ConfigError as error:
            error.where = error.where or key
            raise
    import datasets

    name, _, split = path.partition(":")
    try:
        return FolderRows(path, datasets.load_dataset(name, split=split or "train"))
    except Exception as error:  # the hub's client raises many kinds
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} is neither a file nor a data set that can be loaded: {text}",
            where=key,
            hint=f"looked from {Path.cwd()}; a data set of the hub is owner/name or owner/name:split",
        ) from None


def columns_of(data: DataConfig) -> list[str]:
    """The columns that the templates name."""
    return sorted({*fields_of(data.source), *fields_of(data.target)})


def fields_of(template: str) -> list[str]:
    """The columns that a template names."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def _runs(rows: Sequence[int], ends: np.ndarray) -> Iterator[tuple[int, int, list[int]]]:
    """(reader, its first row, rows) for every stretch of `rows` that lies in one reader."""
    numbers = np.asarray(rows, dtype=np.int64)
    readers = np.searchsorted(ends, numbers, side="right")
    for part in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(readers)) + 1):
        if len(part):
            reader = int(readers[part[0]])
            yield reader, int(ends[reader - 1]) if reader else 0, numbers[part].tolist()


def _fill(template: str, fields: list[str], columns: dict[str, Any], place: str) -> str:
    for name in fields:
        if columns.get(name) is None:
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
