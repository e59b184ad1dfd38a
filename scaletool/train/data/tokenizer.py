"""The tokenizer of a run: bytes, a vocabulary trained on the data, or a saved one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scaletool.config import RunConfig, TokenizerConfig
from scaletool.errors import ConfigError
from scaletool.train.data.sources import Source, content_of, digest

SPECIAL_TOKENS = ["<pad>", "</s>", "<unk>"]


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
    data = config.data
    key = digest(
        {"train": content_of(data.train), "texts": [data.source, data.target], "vocab_size": settings.vocab_size}
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
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                source = Source(data.train, data, Path(folder))
                try:
                    texts = (text for pair in source for text in (pair.source, pair.target))
                    tokenizer.train_from_iterator(texts, trainer)
                except ConfigError:
                    raise
                except Exception as error:  # the library raises no other kind
                    size = settings.vocab_size
                    raise ConfigError(
                        f"no vocabulary of {size} pieces can be trained: {error}", where="tokenizer.vocab_size"
                    ) from None
            scratch = path.with_suffix(f".{os.getpid()}.tmp")
            tokenizer.save(str(scratch))
            os.replace(scratch, path)
    return _with_end_mark(Tokenizer.from_file(str(path)))


def _with_end_mark(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="right"
    )
