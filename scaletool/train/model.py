"""T5 by name, from scratch or from a checkpoint, always in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration, set_seed

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.train.loss import compute_loss_in_forward

T5_VOCABULARY = 32128
"""Rows of the published embedding tables (32,100 pieces, rounded up)."""

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2},
    "small": {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6},
    "base": {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 12},
    "large": {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 24},
    "3b": {"d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32, "num_layers": 24},
    "v1_1-small": {"d_model": 512, "d_ff": 1024, "d_kv": 64, "num_heads": 6, "num_layers": 8},
    "v1_1-base": {"d_model": 768, "d_ff": 2048, "d_kv": 64, "num_heads": 12, "num_layers": 12},
    "v1_1-large": {"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_heads": 16, "num_layers": 24},
    "v1_1-xl": {"d_model": 2048, "d_ff": 5120, "d_kv": 64, "num_heads": 32, "num_layers": 24},
}
"""Shapes of the published checkpoints (their config.json); tiny is for tests."""

FAMILY = ("t5", "mt5", "umt5")
"""Model types of the T5 family (flan and ByT5 are t5): the same start mark, shift and blocks."""

HUB_IDS = {
    **{name: f"google-t5/t5-{name}" for name in ("small", "base", "large", "3b")},
    **{name: f"google/t5-{name}" for name in SIZES if name.startswith("v1_1-")},
}


def build_model(config: RunConfig, tokenizer: Any) -> torch.nn.Module:
    """The model in float32 on the CPU, the same on every rank. Raises ConfigError for a name that cannot be had."""
    set_seed(config.train.seed)
    name = config.model.name
    model: Any
    if config.model.init == "pretrained":
        model = _pretrained(HUB_IDS.get(name, name))
    elif name in SIZES:
        model = T5ForConditionalGeneration(_sized_config(name, tokenizer))
    else:
        model = AutoModelForSeq2SeqLM.from_config(_checkpoint_config(name), dtype=torch.float32)
    _check_vocabulary(model, tokenizer, name)
    _set_dropout(model, config.model.dropout_rate)
    model.config.use_cache = False  # a key-value cache is of no use in training and costs memory
    # T5 ties four modules. One shared module object, not four with one weight, is what FSDP2 can group.
    model.set_input_embeddings(model.get_input_embeddings())
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compute_loss_in_forward(model)
    return model


def _sized_config(name: str, tokenizer: Any) -> T5Config:
    vocabulary = -(-len(tokenizer) // 8) * 8  # tensor cores want multiples of 8
    first_version = not name.startswith("v1_1-")
    config = T5Config(
        **SIZES[name],
        vocab_size=vocabulary if name == "tiny" else max(vocabulary, T5_VOCABULARY),
        feed_forward_proj="relu" if first_version else "gated-gelu",
        tie_word_embeddings=first_version,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    config.tie_word_embeddings = first_version  # transformers 5 makes it True, whatever the constructor is given
    return config


def _pretrained(name: str) -> torch.nn.Module:
    try:
        # dtype "auto", the default, would load half-precision weights that the fp16 scaler refuses to unscale.
        _checkpoint_config(name)
        return AutoModelForSeq2SeqLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"model {name} cannot be loaded: {error}",
            where="model.name",
            hint="give a local folder or hub id, or model.init: scratch with one of " + ", ".join(SIZES),
        ) from None


def _checkpoint_config(name: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(name)
        # What an untied checkpoint's file said survives only in this flag of transformers 5.
        config.tie_word_embeddings = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    except (OSError, ValueError) as error:
        kind = "folder" if Path(name).exists() else "name"
        raise ConfigError(
            f"model {kind} {name} is not known: {error}", where="model.name", hint="sizes: " + ", ".join(SIZES)
        ) from None
    if config.model_type not in FAMILY:
        raise ConfigError(
            f"model {name} is a {config.model_type}", where="model.name", hint="known: " + ", ".join(FAMILY)
        )
    return config


def _check_vocabulary(model: Any, tokenizer: Any, name: str) -> None:
    if len(tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, model {name} only {model.config.vocab_size} embeddings",
            where="tokenizer.kind",
            hint="use the checkpoint's own tokenizer: tokenizer.kind: path",
        )


def _set_dropout(model: Any, rate: float) -> None:
    model.config.dropout_rate = rate
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
        elif hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = rate  # T5Attention keeps its rate as a number
