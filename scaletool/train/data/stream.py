"""Rows read and tokenised when a batch asks for them: nothing but where they begin is kept on disk.

A stream is indexed once (bytes of text rows, row groups of Parquet), so any row is a seek away. That is why it needs
no shards of equal size, no dispatcher and no skipping: it has the same global order, the same dealing to ranks and the
same resume as tokenised data. Packed files (gzip, zstd), which cannot be read from the middle, are unpacked beside the
index.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from scaletool.config import DataConfig, RunConfig
from scaletool.errors import ConfigError
from scaletool.train.data.encode import Encoder
from scaletool.train.data.readers import BadRow
from scaletool.train.data.sources import STDLIB, Example, Source, columns_of, digest, find_files, stdlib_version
from scaletool.train.data.tokenise import Pair, load_tokens, split

INDEX_VERSION = 2
BLOCK_ROWS = 256  # neighbours that are read together


@dataclass(frozen=True)
class StreamedData:
    """The rows of a source, tokenised on demand. sizes: int64, shape (rows,), the bytes of each."""

    source: Source
    tokenizer: Any
    data: DataConfig
    places: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.source) if self.places is None else len(self.places)

    @property
    def sizes(self) -> np.ndarray:
        sizes = self.source.sizes()
        return sizes if self.places is None else sizes[self.places]

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.source.notes)

    def take(self, indices: np.ndarray) -> StreamedData:
        """The rows at `indices`."""
        places = indices if self.places is None else self.places[indices]
        return StreamedData(self.source, self.tokenizer, self.data, places)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.tokenizer, self.data)

    def pairs(self, indices: Sequence[int]) -> list[Pair | BadRow]:
        """The rows at `indices`. Raises ConfigError for a bad row unless told to skip."""
        rows = indices if self.places is None else self.places[list(indices)].tolist()
        read = self.source.read(rows)
        examples = list(self.source.usable(read))
        (sources, source_counts), (targets, target_counts) = self._encoder(examples)
        bad: list[Pair | BadRow] = [entry for entry in read if not isinstance(entry, Example)]
        numbers = [example.row for example in examples]
        return bad + list(map(Pair, numbers, _parts(sources, source_counts), _parts(targets, target_counts)))


def load_stream(config: RunConfig, cache: Path, tokenizer: Any) -> tuple[StreamedData, Any]:
    """Training data as a stream, and validation data: files are tokenised ahead, a share is held out of the stream."""
    data = config.data
    source = _indexed(data, cache)
    if len(source) == 0:
        raise ConfigError(f"no rows in {', '.join(data.train)}: empty", where="data.train")
    train = StreamedData(source, tokenizer, data)
    if data.validation is None:
        return train, None
    if isinstance(data.validation, list):
        return train, load_tokens(data.validation, "data.validation", config, cache, tokenizer)
    kept, held_out = split(len(train), data.validation, data.seed)
    return train.take(kept), train.take(held_out)


def _indexed(data: DataConfig, cache: Path) -> Source:
    """The source with its index, made by the first process that comes here and kept for the files as they are now."""
    settings: dict[str, Any] = {"files": _stamps(data.train), "columns": columns_of(data), "delimiter": data.delimiter}
    settings["version"] = INDEX_VERSION
    folder = cache / f"stream-{digest(settings)}"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "readers.pickle"
    with FileLock(f"{folder}.lock"):
        try:
            with kept.open("rb") as stream:
                readers = pickle.load(stream)
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError):
            readers = None
        source = Source(data.train, data, folder, readers=readers)
        if readers is None:
            scratch = kept.with_suffix(".tmp")
            scratch.write_bytes(pickle.dumps(source.readers))
            os.replace(scratch, kept)
    return source


def _stamps(patterns: list[str]) -> list[Any]:
    """Path, size and time of every file: reading all of a stream to know it would defeat its purpose."""
    if patterns == [STDLIB]:
        return [stdlib_version()]
    stamps: list[Any] = []
    for path in find_files(patterns, "data.train"):
        facts = path.stat() if isinstance(path, Path) else None
        stamps.append([str(path), facts.st_size, facts.st_mtime_ns] if facts else str(path))
    return [str(Path.cwd()), stamps]


def _parts(flat: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(counts)[:-1]) if len(counts) else []
