"""Texts to token numbers, cut at the limits. What a long text has behind its limit is not even tokenised."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from scaletool.config import DataConfig
from scaletool.train.data.sources import Example

FlatTokens = tuple[np.ndarray, np.ndarray]
"""int32: the tokens of many texts one behind the other, and how many each has."""

SAMPLE_TEXTS, SAMPLE_CHARACTERS = 64, 2048  # looked at to learn how many characters a token has
SAFE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "Precompiled", "Strip", "StripAccents"}
"""Those for which the words before a space do not depend on what follows it."""


class Encoder:
    """Tokenises pairs. The tokens are those of the whole texts, cut at `data.max_source_tokens` and
    `data.max_target_tokens`, with the end mark last."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        self.backend = tokenizer.backend_tokenizer
        self.backend.encode_special_tokens = True  # a text that says "</s>" is text, not the end
        self.backend.no_padding()
        can_shorten = words_stand_alone(json.loads(self.backend.to_str()))
        self.sides = [
            Side(self.backend, limit, can_shorten) for limit in (data.max_source_tokens, data.max_target_tokens)
        ]

    def __call__(self, examples: Sequence[Example]) -> list[FlatTokens]:
        """Tokens of the sources and of the targets."""
        return [flat(side) for side in self.encodings(examples)]

    def encodings(self, examples: Sequence[Example]) -> list[list[Any]]:
        """The same as the tokenizer's own objects, whose making needs no lock of Python."""
        texts = [example.source for example in examples], [example.target for example in examples]
        return [side.encode(column) for side, column in zip(self.sides, texts, strict=True)]


class Side:
    """The sources or the targets: texts that are cut at one limit."""

    def __init__(self, backend: Any, limit: int, can_shorten: bool) -> None:
        self.backend, self.limit, self.can_shorten = backend, limit, can_shorten
        self.characters = 0.0  # that `limit` tokens have, nearly always; 0: not known yet

    def encode(self, texts: list[str]) -> list[Any]:
        if self.can_shorten and not self.characters:
            self.characters = self.limit * self._characters_per_token(texts)
        self.backend.enable_truncation(self.limit)
        if not self.can_shorten:
            return list(self.backend.encode_batch_fast(texts))
        short = [shortened(text, int(self.characters)) for text in texts]
        found = list(self.backend.encode_batch_fast(short))
        # A shortened text that reaches the limit has the tokens of the whole text; the others are done again.
        again = [
            place
            for place, encoding in enumerate(found)
            if len(encoding) < self.limit and len(short[place]) < len(texts[place])
        ]
        for place, encoding in zip(
            again, self.backend.encode_batch_fast([texts[place] for place in again]), strict=True
        ):
            found[place] = encoding
        if len(again) > len(texts) / 20:  # other texts than those looked at
            self.characters *= 1.25
        return found

    def _characters_per_token(self, texts: list[str]) -> float:
        """So many that 19 of 20 texts have no more."""
        samples = [text[:SAMPLE_CHARACTERS] for text in texts if len(text) > self.limit][:SAMPLE_TEXTS]
        if not samples:
            return 0.0
        self.backend.no_truncation()
        tokens = [len(encoding) for encoding in self.backend.encode_batch_fast(samples)]
        return float(np.quantile([len(text) / count for text, count in zip(samples, tokens, strict=True)], 0.95))


def shortened(text: str, characters: int) -> str:
    """The words of the first `characters`, or all of the text where it is no longer or has no place for a cut.

    It is cut between a letter or digit and a space: other characters may be spaces to a normalizer that strips them.
    """
    cut = characters if 0 < characters < len(text) else 0
    while cut > 0 and not (text[cut] == " " and text[cut - 1].isalnum()):
        cut = text.rfind(" ", 0, cut)
    return text[:cut] if cut > 0 else text


def words_stand_alone(tokenizer: dict[str, Any]) -> bool:
    """Whether the tokens before a space are the same whatever follows it, by the tokenizer's own description.

    So it is for the T5 family, which splits at spaces before anything else, and for bytes. Other tokenizers may be
    the same; where that is not known, texts are tokenised whole.
    """
    if not all(token["special"] for token in tokenizer["added_tokens"]):
        return False  # one with a space in it could span the cut
    if not all(map(_is_safe, _steps(tokenizer["normalizer"], "normalizers"))):
        return False
    first = next(iter(_steps(tokenizer["pre_tokenizer"], "pretokenizers")), {"type": None})
    if first["type"] == "ByteLevel" and not first["use_regex"]:
        return tokenizer["model"]["type"] == "BPE" and not tokenizer["model"]["merges"]
    return first["type"] == "WhitespaceSplit" or (first["type"] == "Metaspace" and bool(first["split"]))


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for inner in part[name] for step in _steps(inner, name)] if part["type"] == "Sequence" else [part]


def _is_safe(normalizer: dict[str, Any]) -> bool:
    runs_of_spaces = normalizer["type"] == "Replace" and normalizer["pattern"] == {"Regex": " {2,}"}
    return runs_of_spaces or normalizer["type"] in SAFE_NORMALIZERS


def flat(encodings: list[Any]) -> FlatTokens:
    lists = [encoding.ids for encoding in encodings]
    counts = np.fromiter(map(len, lists), dtype=np.int32, count=len(lists))
    return np.fromiter(itertools.chain.from_iterable(lists), dtype=np.int32, count=int(counts.sum())), counts
