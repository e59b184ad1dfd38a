"""Rules over T5 model configs, and over what of our own run configs depends on the target."""

from __future__ import annotations

from collections.abc import Iterator

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Edit, Problem, rule

GOOD = """\
{
  "model_type": "t5",
  "vocab_size": 32128,
  "d_model": 512,
  "d_kv": 64,
  "d_ff": 1024,
  "num_layers": 8,
  "num_heads": 6,
  "feed_forward_proj": "gated-gelu",
  "decoder_start_token_id": 0,
  "pad_token_id": 0,
  "eos_token_id": 1
}
"""
T5_TYPES = ("t5", "mt5", "umt5")


@rule(
    "model-start-token",
    "error",
    "model",
    bad=GOOD.replace('  "decoder_start_token_id": 0,\n', ""),
    good=GOOD,
    link="huggingface/transformers#8218",
)
def start_token(document: Document, context: Context) -> Iterator[Problem]:
    """T5 makes the decoder's inputs from the labels, and begins them with this token; without it, the first step
    fails."""
    if document.get("decoder_start_token_id") is None and document.get("model_type", "t5") in T5_TYPES:
        pad = document.get("pad_token_id")
        missing = "decoder_start_token_id" if pad is not None else "decoder_start_token_id and pad_token_id"
        edit = Edit("set", "decoder_start_token_id", pad if isinstance(pad, int) else 0)
        yield Problem(
            "decoder_start_token_id", f"{missing} missing", "set 0, the pad token, as T5 was trained", (edit,)
        )


@rule(
    "model-start-is-pad",
    "warning",
    "model",
    bad=GOOD.replace('"decoder_start_token_id": 0', '"decoder_start_token_id": 2'),
    good=GOOD,
)
def start_is_pad(document: Document, context: Context) -> Iterator[Problem]:
    """All published T5 models start the decoder with the pad token."""
    start, pad = document.get("decoder_start_token_id"), document.get("pad_token_id")
    if isinstance(start, int) and isinstance(pad, int) and start != pad:
        message = f"decoder_start_token_id is {start}, pad_token_id {pad}; T5 was trained with the same"
        yield Problem("decoder_start_token_id", message, f"set {pad}")


@rule(
    "model-vocabulary",
    "error",
    "model",
    bad=GOOD.replace('"vocab_size": 32128', '"vocab_size": 32000,\n  "tokenizer_len": 32100'),
    good=GOOD.replace('"vocab_size": 32128', '"vocab_size": 32128,\n  "tokenizer_len": 32100'),
)
def vocabulary(document: Document, context: Context) -> Iterator[Problem]:
    """A token number beyond the embedding table is an illegal memory access on a GPU. A larger table is normal."""
    size, tokens = document.get("vocab_size"), document.get("tokenizer_len")
    if isinstance(size, int) and isinstance(tokens, int) and tokens > size:
        message = f"vocab_size is {size}, the tokenizer has {tokens} tokens"
        yield Problem("vocab_size", message, f"set {-(-tokens // 128) * 128}, or use the checkpoint's own tokenizer")


@rule(
    "model-multiples-of-8",
    "warning",
    "model",
    bad=GOOD.replace("32128", "32101"),
    good=GOOD,
)
def multiples_of_8(document: Document, context: Context) -> Iterator[Problem]:
    """Tensor cores take fp16 matrices whose sides are multiples of 8; others are computed without them."""
    for key in ("vocab_size", "d_model", "d_ff", "d_kv"):
        size = document.get(key)
        if isinstance(size, int) and size >= 8 and size % 8:
            yield Problem(
                key, f"{key} is {size}: fp16 matrices of it miss the tensor cores", f"use {-(-size // 8) * 8}"
            )


@rule(
    "model-half-checkpoint",
    "warning",
    "model",
    bad=GOOD.replace('"model_type"', '"dtype": "bfloat16",\n  "model_type"'),
    good=GOOD.replace('"model_type"', '"dtype": "float32",\n  "model_type"'),
    link="from_pretrained's default dtype is auto in transformers 5",
)
def half_checkpoint(document: Document, context: Context) -> Iterator[Problem]:
    """transformers 5 loads weights in the dtype that the checkpoint's config names. fp16 training needs float32
    weights, and a V100 has no bf16 units."""
    for key in ("dtype", "torch_dtype"):
        dtype = str(document.get(key)).removeprefix("torch.")
        if dtype in ("float16", "bfloat16") and not (dtype == "bfloat16" and context.gpu.has_bf16):
            message = f"{key} is {dtype}: from_pretrained loads the weights so, unless it is told otherwise"
            yield Problem(key, message, "load with dtype=torch.float32", (Edit("set", key, "float32"),))


@rule(
    "model-feed-forward",
    "error",
    "model",
    bad=GOOD.replace("gated-gelu", "gated_gelu"),
    good=GOOD,
    link="ValueError in transformers 5",
)
def feed_forward(document: Document, context: Context) -> Iterator[Problem]:
    """The name of the feed-forward layer is an activation, or `gated-` and an activation."""
    name = document.get("feed_forward_proj")
    if not isinstance(name, str):
        return
    if name.startswith("gated_") or ("-" in name and not name.startswith("gated-")) or name.count("-") > 1:
        near = name.replace("gated_", "gated-")
        yield Problem("feed_forward_proj", f"feed_forward_proj is {name!r}", f"write {near!r}, relu or gated-gelu")


@rule(
    "run-bf16",
    "error",
    "run",
    bad="train:\n  precision: bf16\n",
    good="train:\n  precision: fp16\n",
    link="pytorch/pytorch#124996",
)
def run_bf16(document: Document, context: Context) -> Iterator[Problem]:
    """A V100 has no bf16 units: they are emulated, silently, and slower than float32."""
    if document.get("train.precision") == "bf16" and not context.gpu.has_bf16:
        message = f"train.precision is bf16 on a {context.gpu.name}, which has no bf16 units: they are emulated"
        yield Problem("train.precision", message, "set fp16", (Edit("set", "train.precision", "fp16"),))
