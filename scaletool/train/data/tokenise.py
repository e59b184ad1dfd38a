"""Texts to token numbers, once per content and settings, in an Arrow cache on disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scaletool.config import DataConfig, RunConfig, TokenizerConfig
from scaletool.errors import ConfigError
from scaletool.train.data.sources import STDLIB, Source, find_files, stdlib_version

CACHE_VERSION = 2
ROWS_PER_PROCESS = 2000
SPECIAL_TOKENS = ["<pad>", "</s>", "<unk>"]


@dataclass(frozen=True)
class TokenisedData:
    """Tokenised pairs and the lengths that the order is made from.

    rows: dataset with `row` (source order), `input_ids`, `labels`, both ending in the end mark.
    source_lengths, target_lengths: int32 arrays of shape (num_rows,), in tokens.
    """

    rows: datasets.Dataset
    source_lengths: np.ndarray
    target_lengths: np.ndarray
    skipped_rows: int = 0
    first_skipped: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: np.ndarray) -> TokenisedData:
        """The pairs at `indices`, skip counts kept."""
        return TokenisedData(
            self.rows.select(indices),
            self.source_lengths[indices],
            self.target_lengths[indices],
            self.skipped_rows,
            self.first_skipped,
        )


def load_data(config: RunConfig, cache: Path, tokenizer: Any) -> tuple[TokenisedData, TokenisedData | None]:
    """Training and validation data, tokenised or taken from the cache. Raises ConfigError for unusable data."""
    data = config.data
    train = _load(data.train, "data.train", config, cache, tokenizer)
    if data.validation is None:
        return train, None
    if isinstance(data.validation, list):
        return train, _load(data.validation, "data.validation", config, cache, tokenizer)
    held_out = max(1, round(len(train) * data.validation))
    if held_out == len(train):
        raise ConfigError(
            f"{len(train)} rows leave none to train on", where="data.validation", hint="name files, or null"
        )
    shuffled = np.random.default_rng(data.seed).permutation(len(train))
    return train.take(np.sort(shuffled[held_out:])), train.take(np.sort(shuffled[:held_out]))


def load_tokenizer(config: RunConfig, cache: Path) -> Any:
    """The tokenizer of the run config: pad, end and unknown have numbers, calls end in the end mark."""
    settings = config.tokenizer
    if settings.kind == "bytes":
        return _byte_tokenizer()
    if settings.kind == "path":
        try:
            return AutoTokenizer.from_pretrained(settings.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer {settings.path} cannot be loaded: {error}", where="tokenizer.path") from None
    return _trained_tokenizer(config, settings, cache)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """UTF-8 bytes with ByT5's numbers: pad 0, end 1, unknown 2, byte b is b + 3."""
    alphabet = bytes_to_unicode()
    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {alphabet[byte]: byte + len(SPECIAL_TOKENS) for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_end_mark(tokenizer)


def bytes_to_unicode() -> dict[int, str]:
    """The visible character that byte-level tokenizers write for each byte (the table of GPT-2's encoder)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


def _trained_tokenizer(config: RunConfig, settings: TokenizerConfig, cache: Path) -> PreTrainedTokenizerFast:
    key = _digest(
        {"train": _content(config.data.train), "texts": _templates(config.data), "vocab_size": settings.vocab_size}
    )
    path = cache / f"tokenizer-{key}.json"
    with FileLock(f"{path}.lock"):
        if not path.is_file():
            tokenizer = Tokenizer(models.Unigram())
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.decoder = decoders.Metaspace()
            trainer = trainers.UnigramTrainer(
                vocab_size=settings.vocab_size, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False
            )
            source = _source(config.data.train, "data.train", config.data)
            tokenizer.train_from_iterator((text for pair in source for text in (pair.source, pair.target)), trainer)
            scratch = path.with_suffix(f".{os.getpid()}.tmp")
            tokenizer.save(str(scratch))
            os.replace(scratch, path)
    return _with_end_mark(Tokenizer.from_file(str(path)))


def _with_end_mark(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="right"
    )


def _load(patterns: list[str], key: str, config: RunConfig, cache: Path, tokenizer: Any) -> TokenisedData:
    """Tokenise or load one set of files. One process per cache entry works, the others wait for its lock."""
    data = config.data
    settings = {
        "version": CACHE_VERSION,
        "content": _content(patterns, key),
        "templates": _templates(data),
        "limits": [data.max_source_tokens, data.max_target_tokens],
        "on_bad_row": data.on_bad_row,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
    }
    folder = cache / f"tokens-{_digest(settings)}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        try:
            return _read(folder)
        except (OSError, ValueError, KeyError):  # not there yet, or damaged
            shutil.rmtree(folder, ignore_errors=True)
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        try:
            _tokenise(_source(patterns, key, data), tokenizer, data, scratch)
            os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return _read(folder)


def _read(folder: Path) -> TokenisedData:
    rows = datasets.load_from_disk(str(folder / "rows"))
    lengths = np.load(folder / "lengths.npy")
    skipped = json.loads((folder / "skipped.json").read_text())
    return TokenisedData(rows, lengths[0], lengths[1], skipped["count"], skipped["first"])


def _source(patterns: list[str], key: str, data: DataConfig) -> Source:
    return Source(patterns, data.source, data.target, data.on_bad_row, key)


def _tokenise(source: Source, tokenizer: Any, data: DataConfig, folder: Path) -> None:
    def texts() -> Iterator[dict[str, Any]]:
        for example in source:
            yield {"row": example.row, "source": example.source, "target": example.target}

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # split_special_tokens: a text that says "</s>" is text, not the end.
        common = {"truncation": True, "split_special_tokens": True}
        return {
            "input_ids": tokenizer(batch["source"], max_length=data.max_source_tokens, **common)["input_ids"],
            "labels": tokenizer(batch["target"], max_length=data.max_target_tokens, **common)["input_ids"],
        }

    datasets.disable_progress_bars()
    text_rows = _from_generator(texts, folder / "texts")
    if len(text_rows) == 0:
        skipped = (
            f"; {source.bad_rows.count} skipped, the first: {source.bad_rows.first}" if source.bad_rows.count else ""
        )
        raise ConfigError(f"no usable rows in {', '.join(source.patterns)}{skipped}", where=source.key)
    processes = min(len(os.sched_getaffinity(0)), len(text_rows) // ROWS_PER_PROCESS)
    rows = text_rows.map(
        encode,
        batched=True,
        remove_columns=["source", "target"],
        num_proc=processes if processes > 1 else None,
        cache_file_name=str(folder / "map.arrow"),
        new_fingerprint="tokenised",
    )
    rows.save_to_disk(str(folder / "rows"))
    lengths = [rows.data.column(name).combine_chunks() for name in ("input_ids", "labels")]
    np.save(folder / "lengths.npy", np.stack([_list_lengths(column) for column in lengths]))
    (folder / "skipped.json").write_text(json.dumps({"count": source.bad_rows.count, "first": source.bad_rows.first}))
    shutil.rmtree(folder / "texts", ignore_errors=True)
    for scratch in folder.glob("map*.arrow"):
        scratch.unlink()


def _from_generator(texts: Any, folder: Path) -> datasets.Dataset:
    features = datasets.Features(
        {
            "row": datasets.Value("int64"),
            "source": datasets.Value("large_string"),
            "target": datasets.Value("large_string"),
        }
    )
    path = folder / "texts.arrow"
    folder.mkdir(parents=True)
    with datasets.arrow_writer.ArrowWriter(path=str(path), features=features) as writer:
        for row in texts():
            writer.write(row)
        count, _ = writer.finalize()
    return datasets.Dataset.from_file(str(path)) if count else datasets.Dataset.from_dict({})


def _list_lengths(column: Any) -> np.ndarray:
    import pyarrow.compute

    return np.asarray(pyarrow.compute.list_value_length(column), dtype=np.int32)


def _templates(data: DataConfig) -> list[str]:
    return [data.source, data.target]


def _content(patterns: list[str], key: str = "data.train") -> list[str]:
    """A digest per file. The whole content counts: a file edited in place must not hit the old cache."""
    if patterns == [STDLIB]:
        return [stdlib_version()]
    digests = []
    for path in find_files(patterns, key):
        digest = hashlib.sha256(str(path.suffixes).encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
        digests.append(digest.hexdigest())
    return digests


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
