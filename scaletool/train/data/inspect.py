"""What a user should know of data before training on it: rows, lengths, cuts, duplicates, overlap, padding."""

from __future__ import annotations

import glob
import hashlib
import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scaletool.config import DataConfig, RunConfig
from scaletool.errors import ConfigError
from scaletool.train.data import groups
from scaletool.train.data.batches import MicroBatch, ShardSampler
from scaletool.train.data.encode import Encoder
from scaletool.train.data.order import GlobalOrder
from scaletool.train.data.readers import BadRow
from scaletool.train.data.sources import ROWS_PER_READ, Example, Source

NO_LIMIT = 1 << 20  # tokens: long enough to see how long rows really are
SMALLEST_NODE = 4  # GPUs
UNEVEN = 1.5  # largest / smallest file
STEPS_LOOKED_AT = 256
BAD_ROWS_SHOWN = 3
BATCHINGS = ("padded", "bucketed", "packed")


@dataclass
class Inspected:
    """The rows of one file. lengths: int32, shape (2, rows), source and target tokens, not cut."""

    name: str
    rows: int = 0
    bad_rows: int = 0
    lengths: np.ndarray = field(default_factory=lambda: np.empty((2, 0), np.int32), repr=False)
    hashes: set[bytes] = field(default_factory=set, repr=False)
    findings: list[dict[str, str]] = field(default_factory=list)

    def find(self, severity: str, message: str, fix: str) -> None:
        self.findings.append({"severity": severity, "file": self.name, "message": message, "fix": fix})


def inspect(patterns: Sequence[str], config: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """Everything that the report shows; findings that are errors are what training would refuse."""
    files = [_inspect_file(name, config.data, tokenizer) for name in _names(patterns)]
    findings = [finding for file in files for finding in file.findings]
    findings += _between(files)
    lengths = np.concatenate([file.lengths for file in files], axis=1)
    report: dict[str, Any] = {
        "files": [{"file": file.name, "rows": file.rows, "bad_rows": file.bad_rows} for file in files],
        "rows": int(lengths.shape[1]),
        "findings": findings,
    }
    if lengths.shape[1]:
        limits = (config.data.max_source_tokens, config.data.max_target_tokens)
        sides = zip(("source", "target"), lengths, limits, strict=True)
        report["tokens"] = {side: _percentiles(own, limit) for side, own, limit in sides}
        cut = [np.minimum(own, limit) for own, limit in zip(lengths, limits, strict=True)]
        report["padding_share"] = {name: padding_share(*cut, batching=name, data=config.data) for name in BATCHINGS}
    return report


def padding_share(sources: np.ndarray, targets: np.ndarray, *, batching: str, data: DataConfig) -> float:
    """Share of the slots of one rank's batches that hold no token. sources, targets: shape (rows,), in tokens."""
    real = slots = 0
    for micro in _batches(sources, targets, batching, data, world_size=1)[0]:
        tokens, padded = work(micro, sources, targets, packed=batching == "packed")
        real, slots = real + tokens, slots + padded
    return 1 - real / slots


def imbalance(sources: np.ndarray, targets: np.ndarray, *, batching: str, data: DataConfig, ranks: int) -> float:
    """Mean over steps of the busiest rank's real tokens / the mean rank's, for one micro-batch a step."""
    per_rank = [
        [work(micro, sources, targets, packed=batching == "packed")[0] for micro in own]
        for own in _batches(sources, targets, batching, data, world_size=ranks)
    ]
    full = [step for step in zip(*per_rank, strict=True)][:-1] or [step for step in zip(*per_rank, strict=True)]
    return float(np.mean([max(step) / np.mean(step) for step in full]))


def work(micro: MicroBatch, sources: np.ndarray, targets: np.ndarray, *, packed: bool) -> tuple[int, int]:
    """(real tokens, padded slots) of a micro-batch."""
    rows = micro.indices if packed else tuple((row,) for row in itertools.chain.from_iterable(micro.indices))
    lengths = [[int(sum(side[place] for place in row)) for row in rows] for side in (sources, targets)]
    real = sum(map(sum, lengths))
    widest = [groups.padded_length(max(side, default=1)) for side in lengths]
    return real, max(1, len(rows)) * sum(widest)


def _batches(
    sources: np.ndarray, targets: np.ndarray, batching: str, data: DataConfig, world_size: int
) -> list[list[MicroBatch]]:
    grouped = lengths = None
    if batching == "packed":
        slots = data.pack_tokens or data.max_source_tokens
        grouped = groups.pack(sources, targets, slots, groups.target_slots(sources, targets, slots))
        lengths = groups.work_of_packed(grouped, sources, targets)
    elif batching == "bucketed":
        lengths = sources.astype(np.int64) + targets
    per_device = data.per_device_batch_size
    units = len(sources) if grouped is None else len(grouped)
    order = GlobalOrder(units, world_size * per_device, data.seed, lengths)
    steps = range(min(STEPS_LOOKED_AT, order.steps_per_epoch))
    return [
        list(
            ShardSampler(
                order,
                targets,
                rank=rank,
                world_size=world_size,
                per_device_batch_size=per_device,
                steps=steps,
                groups=grouped,
                packed=batching == "packed",
            )
        )
        for rank in range(world_size)
    ]


def _names(patterns: Sequence[str]) -> list[str]:
    """One name per file, as the user wrote it; what a glob stands for is taken apart."""
    names: list[str] = []
    for pattern in patterns:
        matches = [] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        names += matches or [pattern]
    return names


def _inspect_file(name: str, data: DataConfig, tokenizer: Any) -> Inspected:
    found = Inspected(name)
    whole = replace(data, max_source_tokens=NO_LIMIT, max_target_tokens=NO_LIMIT)
    encode = Encoder(tokenizer, whole)
    with tempfile.TemporaryDirectory() as folder:
        try:
            source = Source([name], data, Path(folder))
        except ConfigError as error:
            found.find("error", error.message, error.hint or "")
            return found
        for note in source.notes:
            found.find("warning", note, "")
        lengths: list[np.ndarray] = []
        bad_rows: list[str] = []
        for pairs in _blocks(source):
            bad = [pair for pair in pairs if isinstance(pair, BadRow)]
            good = [pair for pair in pairs if isinstance(pair, Example)]
            found.bad_rows += len(bad)
            bad_rows += map(str, bad[: BAD_ROWS_SHOWN - len(bad_rows)])
            lengths.append(np.stack([counts for _, counts in encode(good)]))
            _remember(found, good)
        found.lengths = np.concatenate(lengths, axis=1) if lengths else found.lengths
    found.rows = found.lengths.shape[1]
    _judge(found, bad_rows, data)
    return found


def _blocks(source: Source) -> Iterator[list[Example | BadRow]]:
    for start in range(0, len(source), ROWS_PER_READ):
        yield source.read(range(start, min(start + ROWS_PER_READ, len(source))))


def _remember(found: Inspected, pairs: list[Example]) -> None:
    found.hashes |= {
        hashlib.blake2b(f"{pair.source}\0{pair.target}".encode(), digest_size=12).digest() for pair in pairs
    }


def _judge(found: Inspected, bad_rows: list[str], data: DataConfig) -> None:
    if bad_rows:
        severity = "error" if data.on_bad_row == "error" else "warning"
        rows = f"{found.bad_rows} bad row{'s' if found.bad_rows > 1 else ''}"
        shown = "; ".join(bad_rows) + ("; ..." if found.bad_rows > len(bad_rows) else "")
        found.find(severity, f"{rows}: {shown}", "mend the file, or set data.on_bad_row: skip")
    if found.rows == 0:
        found.find("error", f"{found.name} is empty: no usable rows", "name a file with rows")
        return
    sides = zip(("source", "target"), found.lengths, (data.max_source_tokens, data.max_target_tokens), strict=True)
    for side, lengths, limit in sides:
        if cut := int((lengths > limit).sum()):
            message = f"{cut} of {found.rows} rows ({cut / found.rows:.1%}) are cut at data.max_{side}_tokens {limit}"
            wider = limit_for(lengths)
            fix = f"{wider} would cut one row in a hundred" if wider > limit else "nothing, if they may lose their ends"
            found.find("warning", f"{message}; the longest has {lengths.max()} tokens", fix)
    if twice := found.rows - len(found.hashes):
        found.find("warning", f"{twice} rows are exact duplicates of others", "remove them")
    if found.rows < SMALLEST_NODE:
        message = f"{found.rows} rows are fewer than {SMALLEST_NODE} processes: such a run would be refused"
        found.find("info", message, "use fewer processes, or more data")


def limit_for(lengths: np.ndarray) -> int:
    """A limit that cuts one row in a hundred, in multiples of 8."""
    return groups.padded_length(int(np.percentile(lengths, 99)))


def _between(files: list[Inspected]) -> list[dict[str, str]]:
    joined = Inspected(", ".join(file.name for file in files))
    for one, other in itertools.combinations(files, 2):
        if shared := len(one.hashes & other.hashes):
            message = f"{shared} rows of {other.name} are also in {one.name}: overlap"
            joined.find("warning", message, "validation on training rows shows nothing; remove them from one file")
    for shards in _shards(files):
        counts = [file.rows for file in shards]
        if min(counts) and max(counts) > UNEVEN * min(counts):
            message = f"shards hold uneven numbers of rows: {', '.join(map(str, counts))}"
            fix = "nothing to do, rows are dealt one by one; tools that give whole files to processes lose rows or hang"
            joined.find("warning", message, fix)
    return joined.findings


def _shards(files: list[Inspected]) -> list[list[Inspected]]:
    """Files whose names differ in numbers only: pieces of one data set."""
    by_name: dict[str, list[Inspected]] = {}
    for file in files:
        by_name.setdefault(re.sub(r"\d+", "#", file.name), []).append(file)
    return [shards for shards in by_name.values() if len(shards) > 1]


def _percentiles(lengths: np.ndarray, limit: int) -> dict[str, Any]:
    cuts = {f"p{share}": int(np.percentile(lengths, share)) for share in (50, 90, 99)}
    return {
        **cuts,
        "max": int(lengths.max()),
        "limit": limit,
        "cut_share": float((lengths > limit).mean()),
        "suggested_limit": limit_for(lengths),
    }
