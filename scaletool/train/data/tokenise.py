"""Texts to token numbers, once per content and settings, in an Arrow cache on disk.

A cache entry is a folder: Arrow parts of up to ROWS_PER_PART rows, and the lengths of all rows beside them. Work that
was interrupted goes on behind its last whole part.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from filelock import FileLock

from scaletool.config import DataConfig, RunConfig
from scaletool.errors import ConfigError
from scaletool.record import read_json, write_json
from scaletool.train.data.encode import Encoder, FlatTokens, flat
from scaletool.train.data.groups import Groups
from scaletool.train.data.sources import Example, Source, content_of, digest

CACHE_VERSION = 4
DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile, pyarrow.ArrowException)
"""What reading a cache entry raises where a file of it is missing or not whole."""
ROWS_PER_PART = 1 << 16
ROWS_PER_CALL = 4096  # texts handed to the tokenizer at once, to be spread over all cores
COLUMNS = ("input_ids", "labels")


class Pair(NamedTuple):
    """number: of the row in the source order. source, target: int32, its tokens."""

    number: int
    source: np.ndarray
    target: np.ndarray


Progress = Callable[[int, int], None]
"""Called with the rows done and the rows there are."""


@dataclass(frozen=True)
class TokenisedData:
    """Tokenised pairs on disk, both sides ending in the end mark, and their lengths.

    numbers: int64, row numbers in the source order. source_lengths, target_lengths: int32, in tokens. All of shape
    (rows,). places: where a row stands in the cache; None for the same place.
    """

    folder: Path
    numbers: np.ndarray
    source_lengths: np.ndarray
    target_lengths: np.ndarray
    skipped_rows: int = 0
    first_skipped: str | None = None
    notes: tuple[str, ...] = ()
    places: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.numbers)

    def __reduce__(self) -> Any:
        return _reopen, (self.folder, self.places)  # loader processes map the files for themselves

    def take(self, indices: np.ndarray) -> TokenisedData:
        """The pairs at `indices`, skip counts kept."""
        places = indices if self.places is None else self.places[indices]
        return replace(
            self,
            numbers=self.numbers[indices],
            source_lengths=self.source_lengths[indices],
            target_lengths=self.target_lengths[indices],
            places=places,
        )

    def pairs(self, indices: Sequence[int]) -> list[Pair]:
        """The rows at `indices`, without a copy of their tokens."""
        parts, ends = self._parts
        found = []
        for index in indices:
            place = int(index if self.places is None else self.places[index])
            part = int(np.searchsorted(ends, place, side="right"))
            place -= int(ends[part - 1]) if part else 0
            tokens = (values[offsets[place] : offsets[place + 1]] for values, offsets in parts[part])
            found.append(Pair(int(self.numbers[index]), *tokens))
        return found

    @cached_property
    def _parts(self) -> tuple[list[list[tuple[np.ndarray, np.ndarray]]], np.ndarray]:
        """(values, offsets) of both columns of every part, mapped from disk, and the rows up to each part's end."""
        parts = []
        for path in sorted(self.folder.glob("part-*.arrow")):
            table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
            columns = [table.column(name).chunk(0) for name in COLUMNS]
            parts.append([(column.values.to_numpy(), column.offsets.to_numpy()) for column in columns])
        return parts, np.cumsum([len(part[0][1]) - 1 for part in parts], dtype=np.int64)


def load_data(
    config: RunConfig, cache: Path, tokenizer: Any, progress: Progress | None = None
) -> tuple[TokenisedData, TokenisedData | None]:
    """Training and validation data, tokenised or taken from the cache. Raises ConfigError for unusable data."""
    data = config.data
    train = load_tokens(data.train, "data.train", config, cache, tokenizer, progress)
    if data.validation is None:
        return train, None
    if isinstance(data.validation, list):
        return train, load_tokens(data.validation, "data.validation", config, cache, tokenizer, progress)
    kept, held_out = split(len(train), data.validation, data.seed)
    return train.take(kept), train.take(held_out)


def split(rows: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows to train on, rows to validate on), both in source order. Raises ConfigError where none would be left."""
    held_out = max(1, round(rows * share))
    if held_out >= rows:
        raise ConfigError(f"{rows} rows leave none to train on", where="data.validation", hint="name files, or null")
    shuffled = np.random.default_rng(seed).permutation(rows)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def load_tokens(
    patterns: list[str], key: str, config: RunConfig, cache: Path, tokenizer: Any, progress: Progress | None = None
) -> TokenisedData:
    """Tokenise or load one set of files. One process per cache entry works, the others wait for its lock."""
    data = config.data
    settings = {
        "version": CACHE_VERSION,
        "content": content_of(patterns, key),
        "templates": [data.source, data.target],
        "delimiter": data.delimiter,
        "limits": [data.max_source_tokens, data.max_target_tokens],
        "on_bad_row": data.on_bad_row,
        "tokenizer": tokenizer_digest(tokenizer),
    }
    folder = cache / f"tokens-{digest(settings)}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        try:
            return _read(folder)
        except DAMAGED:  # or not there yet
            shutil.rmtree(folder, ignore_errors=True)
        partial = folder.with_name(f"{folder.name}.partial")
        partial.mkdir(exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                tokenise(Source(patterns, data, Path(scratch), key), tokenizer, data, partial, progress)
        except ConfigError:  # the data has to be mended, and will be another entry
            shutil.rmtree(partial, ignore_errors=True)
            raise
        os.replace(partial, folder)
        for path in folder.glob("part-*.npy"):  # not before: a process killed in between must find them
            path.unlink()
        return _read(folder)


def tokenizer_digest(tokenizer: Any) -> str:
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def tokenise(source: Source, tokenizer: Any, data: DataConfig, folder: Path, progress: Progress | None = None) -> None:
    """Write the parts that are missing in `folder`, then the lengths of all. Raises ConfigError for no usable row."""
    encoder = Encoder(tokenizer, data)
    for number, start in enumerate(range(0, len(source), ROWS_PER_PART)):
        facts = folder / f"part-{number:06}.json"
        if not facts.is_file():
            rows = range(start, min(start + ROWS_PER_PART, len(source)))
            before = source.bad_rows.count
            source.bad_rows.first = None
            numbers, lengths = _write_part(source, rows, encoder, folder / f"part-{number:06}", progress)
            np.save(facts.with_suffix(".npy"), np.stack([numbers, *lengths]))
            write_json(facts, {"skipped": source.bad_rows.count - before, "first": source.bad_rows.first})
        elif progress:
            progress(min(start + ROWS_PER_PART, len(source)), len(source))
    facts_of_parts: list[Any] = [read_json(path) for path in sorted(folder.glob("part-*.json"))]
    skipped = sum(facts["skipped"] for facts in facts_of_parts)
    first = next((facts["first"] for facts in facts_of_parts if facts["first"]), None)
    columns = [np.load(path) for path in sorted(folder.glob("part-*.npy"))]
    joined = np.concatenate(columns, axis=1) if columns else np.empty((3, 0), dtype=np.int64)
    if joined.shape[1] == 0:
        note = f"; {skipped} skipped, the first: {first}" if skipped else ""
        raise ConfigError(f"no usable rows in {', '.join(source.patterns)}: empty{note}", where=source.key)
    np.save(folder / "numbers.npy", joined[0])
    np.save(folder / "lengths.npy", joined[1:].astype(np.int32))
    write_json(folder / "facts.json", {"skipped": skipped, "first": first, "notes": source.notes})


def _write_part(
    source: Source, rows: range, encoder: Encoder, path: Path, progress: Progress | None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One Arrow file; returns row numbers and lengths. While the tokenizer works, outside Python's lock, threads read
    the next texts and take over the last tokens."""
    numbers: list[int] = []
    coming: list[Future[list[FlatTokens]]] = []
    with ThreadPoolExecutor(1) as flattening:
        for examples in _read_ahead(source, rows):
            numbers += [example.row for example in examples]
            encodings = encoder.encodings(examples)
            coming.append(flattening.submit(lambda sides: [flat(side) for side in sides], encodings))
            del encodings  # they are large, and freed in the thread
            if progress:
                progress(numbers[-1] + 1 if numbers else rows.stop, len(source))
        tokens = [part.result() for part in coming]
    arrays, lengths = [], []
    for column in range(len(COLUMNS)):
        values = np.concatenate([part[column][0] for part in tokens] or [np.empty(0, np.int32)])
        counts = np.concatenate([part[column][1] for part in tokens] or [np.empty(0, np.int32)])
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        arrays.append(pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values)))
        lengths.append(counts)
    if not numbers:  # all bad: Arrow writes no batch for no rows
        return np.empty(0, dtype=np.int64), lengths
    table = pyarrow.table(arrays, names=list(COLUMNS))
    with (
        pyarrow.OSFile(str(path.with_suffix(".arrow")), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    return np.array(numbers, dtype=np.int64), lengths


def _read_ahead(source: Source, rows: range) -> Iterator[list[Example]]:
    """Usable pairs in blocks; the next block is read in a thread while the caller works on this one."""
    blocks = [rows[start : start + ROWS_PER_CALL] for start in range(0, len(rows), ROWS_PER_CALL)]
    with ThreadPoolExecutor(1) as reading:
        coming = None
        for block in [*blocks, None]:
            here, coming = coming, reading.submit(source.read, block) if block is not None else None
            if here is not None:
                yield list(source.usable(here.result()))


def load_groups(data: TokenisedData, name: str, settings: dict[str, Any], make: Callable[[], Groups]) -> Groups:
    """Groups from the cache entry of the tokens, made at the first call."""
    rows = [len(data), None if data.places is None else hashlib.sha256(data.places.tobytes()).hexdigest()]
    path = data.folder / f"{name}-{digest({**settings, 'rows': rows})}.npz"
    with FileLock(f"{path}.lock"):
        try:
            with np.load(path) as kept:
                return Groups(**kept)
        except DAMAGED:
            groups = make()
            scratch = path.with_suffix(".tmp.npz")
            arrays: dict[str, Any] = {name: array for name, array in vars(groups).items() if array is not None}
            np.savez(scratch, **arrays)
            os.replace(scratch, path)
            return groups


def _reopen(folder: Path, places: np.ndarray | None) -> TokenisedData:
    data = _read(folder)
    return data if places is None else data.take(places)


def _read(folder: Path) -> TokenisedData:
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    numbers = np.load(folder / "numbers.npy", mmap_mode="r")
    lengths = np.load(folder / "lengths.npy", mmap_mode="r")
    data = TokenisedData(
        folder, numbers, lengths[0], lengths[1], facts["skipped"], facts["first"], tuple(facts["notes"])
    )
    if not len(data) == lengths.shape[1] == data._parts[1][-1]:
        raise ValueError(f"{folder} is not whole")
    return data
