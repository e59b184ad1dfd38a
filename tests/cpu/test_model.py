"""Models: the published shapes, the same weights on every call, dropout and tied embeddings as asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.train.data.tokenizer import load_tokenizer
from scaletool.train.model import SIZES, build_model

Make = Callable[..., RunConfig]

PARAMETERS = {
    "small": 60_506_624,
    "base": 222_903_552,
    "large": 737_668_096,
    "3b": 2_851_598_336,
    "v1_1-small": 76_961_152,
    "v1_1-base": 247_577_856,
    "v1_1-large": 783_150_080,
    "v1_1-xl": 2_849_757_184,
}
"""Of the published checkpoints. Version 1.1 does not tie its output layer to the embeddings."""


@pytest.fixture
def build(tiny: Make, tmp_path: Path) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        config = tiny(**changes)
        return build_model(config, load_tokenizer(config, tmp_path))

    return make


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_sizes(name: str, build: Callable[..., Any]) -> None:
    with torch.device("meta"):  # shapes without memory
        model = build(model__name=name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert (model.lm_head.weight is model.shared.weight) == (not name.startswith("v1_1"))
    assert model.config.scale_decoder_outputs == (not name.startswith("v1_1"))


def test_every_size_is_tested() -> None:
    assert set(SIZES) == {"tiny", *PARAMETERS}


def test_weights_follow_the_seed(build: Callable[..., Any]) -> None:
    first, same, other = (build(train__seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["shared.weight"], other["shared.weight"])
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["tiny", "v1_1-small"])
def test_all_embeddings_are_one_module(name: str, build: Callable[..., Any]) -> None:
    with torch.device("meta"):
        model = build(model__name=name)
    assert model.shared is model.encoder.embed_tokens is model.decoder.embed_tokens


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_dropout_rate_reaches_every_module(rate: float, build: Callable[..., Any]) -> None:
    model = build(model__dropout_rate=rate)
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    rates |= {module.dropout for module in model.modules() if isinstance(getattr(module, "dropout", None), float)}
    assert rates == {rate}
    assert model.config.dropout_rate == rate


def test_dropout_acts_in_training_only(build: Callable[..., Any]) -> None:
    ids = torch.arange(3, 19)[None]

    def differs(model: Any) -> bool:
        first, second = (type(model).forward(model, input_ids=ids, decoder_input_ids=ids).logits for _ in range(2))
        return not torch.equal(first, second)

    assert differs(build(model__dropout_rate=0.5).train())
    assert not differs(build(model__dropout_rate=0.5).eval())
    assert not differs(build(model__dropout_rate=0.0).train())


def test_vocabulary_is_padded_to_eights(build: Callable[..., Any]) -> None:
    assert build().config.vocab_size == 264  # 259 tokens of the byte tokenizer


def saved(folder: Path, vocabulary: int = 264, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(99)  # other weights than a fresh model has
    config = T5Config(vocab_size=vocabulary, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_checkpoint_is_loaded_in_float32(dtype: torch.dtype, build: Callable[..., Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "t5", dtype=dtype)
    model = build(model__name=str(folder), model__init="pretrained", model__dropout_rate=0.1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    original = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model.shared.weight, original.shared.weight)
    assert model.shared is model.encoder.embed_tokens is model.decoder.embed_tokens
    assert model.config.use_cache is False


def test_shape_of_a_folder_with_fresh_weights(build: Callable[..., Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "t5")
    model = build(model__name=str(folder))
    original = T5ForConditionalGeneration.from_pretrained(folder)
    assert model.shared.weight.shape == original.shared.weight.shape
    assert not torch.equal(model.shared.weight, original.shared.weight)


def test_vocabulary_that_is_too_small(build: Callable[..., Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "t5", vocabulary=128)
    with pytest.raises(ConfigError, match=r"259 tokens, model .* only 128 embeddings"):
        build(model__name=str(folder), model__init="pretrained")


@pytest.mark.parametrize("init", ["scratch", "pretrained"])
def test_unknown_model(init: str, build: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-model"):
        build(model__name=str(tmp_path / "no-such-model"), model__init=init)
