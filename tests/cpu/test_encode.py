"""Texts shortened before they are tokenised have the tokens that the whole texts have."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, T5Tokenizer

from scaletool.config import DataConfig
from scaletool.train.data.encode import Encoder, words_stand_alone
from scaletool.train.data.sources import Example
from scaletool.train.data.tokenizer import SPECIAL_TOKENS, _byte_tokenizer, _with_end_mark

ALPHABET = [
    *"abcde",
    " ",
    " ",
    "  ",
    "\n",
    "\t",
    "\u00a0",
    "é",
    "e\u0301",
    " \u0301",
    "你",
    "👍🏽",
    "▁",
    "</s>",
    "ﬁ",
    "؀",
]


def texts(count: int = 100) -> list[str]:
    draw = random.Random(0)
    found = ["".join(draw.choices(ALPHABET, k=draw.choice((3, 30, 300, 2000)))) for _ in range(count)]
    return [*found, "x" * 3000, " " * 3000, "a " * 2000, ""]


def trained(
    model: Any = None, split: Any = None, normalizer: Any = None, added: list[Any] | None = None
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model or models.Unigram())
    tokenizer.pre_tokenizer = split or pre_tokenizers.Metaspace()
    if normalizer:
        tokenizer.normalizer = normalizer
    kind = trainers.BpeTrainer if isinstance(tokenizer.model, models.BPE) else trainers.UnigramTrainer
    trainer = kind(vocab_size=120, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(texts(60), trainer)
    tokenizer.add_tokens(added or [])
    return _with_end_mark(tokenizer)


def published() -> Any:
    """A T5 tokenizer as transformers builds it, with the marks of span corruption."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((char, -3.0) for char in "abcdexé")]
    return T5Tokenizer(vocab=[*pieces, ("▁ab", -2.5), ("cd", -2.5)], extra_ids=3)


TOKENIZERS = {
    "bytes": _byte_tokenizer,
    "published": published,
    "unigram": trained,
    "bpe": lambda: trained(models.BPE(unk_token="<unk>")),
    "normalised": lambda: trained(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()])
    ),
    "words": lambda: trained(
        split=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    ),
}
NOT_SHORTENED = {
    "one piece": lambda: trained(split=pre_tokenizers.Metaspace(split=False)),
    "a mark with a space": lambda: trained(added=[AddedToken("a b", normalized=False)]),
    "an unknown pattern": lambda: trained(normalizer=normalizers.Replace(" a", "b")),
}


def check_exact(tokenizer: Any, limit: int, *, shortens: bool) -> None:
    rows = [Example(number, text, text[::-1]) for number, text in enumerate(texts())]
    data = DataConfig(max_source_tokens=limit, max_target_tokens=7)
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    backend.no_padding()
    encoder = Encoder(tokenizer, data)
    assert words_stand_alone(json.loads(backend.to_str())) is shortens
    for start in range(0, len(rows), 64):
        block = rows[start : start + 64]
        for column, (tokens, counts) in zip(("source", "target"), encoder(block), strict=True):
            backend.enable_truncation(limit if column == "source" else 7)
            expected = [encoding.ids for encoding in backend.encode_batch([getattr(row, column) for row in block])]
            assert counts.tolist() == [len(ids) for ids in expected]
            assert tokens.tolist() == [token for ids in expected for token in ids]
    assert all(bool(side.characters) is shortens for side in encoder.sides)


@pytest.mark.parametrize("limit", [1, 2, 16, 200])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_shortened_texts_have_the_tokens_of_whole_ones(name: str, limit: int) -> None:
    check_exact(TOKENIZERS[name](), limit, shortens=True)


@pytest.mark.parametrize("name", NOT_SHORTENED)
def test_where_a_cut_could_change_tokens_none_is_made(name: str) -> None:
    check_exact(NOT_SHORTENED[name](), 16, shortens=False)
