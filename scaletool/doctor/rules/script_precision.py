"""Rules over precision and how models are loaded in training scripts, read as syntax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule
from scaletool.doctor.rules.names import dotted, keyword, line_of, receiver, shown
from scaletool.doctor.rules.syntax import Script, script_of
from scaletool.doctor.rules.trainer_script import GOOD, arguments_calls, is_t5, trainings


def _untested(script: Script, node: ast.AST) -> bool:
    """Not under a condition: what stands under one may never run on this GPU."""
    return not any(isinstance(parent, ast.If | ast.IfExp | ast.BoolOp | ast.Dict) for parent in script.ancestors(node))


@rule(
    "script-bf16",
    "error",
    "script",
    bad=GOOD.replace("fp16=True", "bf16=True"),
    good=GOOD,
    link="huggingface/accelerate#1693",
)
def bf16(document: Document, context: Context) -> Iterator[Problem]:
    """V100 (sm_70) and T4 have no bf16 units: torch emulates them, slower than float32, and no library says so.
    torch.cuda.is_bf16_supported() counts the emulation, so it says True there."""
    script = script_of(document)
    if script is None or context.gpu.has_bf16:
        return
    place = f"{context.gpu.name} (sm_{context.gpu.capability[0]}{context.gpu.capability[1]}) has no bf16 units"
    for line, what, fix in _bf16(script):
        yield Problem(line, f"{what}, but {place}: it is emulated, slower than float32, without a word", fix)


def _bf16(script: Script) -> Iterator[tuple[int, str, str]]:
    for given in arguments_calls(script):
        for name in ("bf16", "bf16_full_eval"):
            entry = given.get(name)
            if entry is not None and script.constant(entry.value) is True:
                yield entry.line, f"{name}=True", "write fp16=True"
            elif entry is not None and _asks_torch(script, entry.value):
                yield (
                    entry.line,
                    f"{name}={shown(entry.value)} is True with emulation",
                    ("ask torch.cuda.get_device_capability()[0] >= 8"),
                )
    for call in script.calls("Accelerator"):
        value = keyword(call, "mixed_precision")
        if value is not None and script.constant(value) == "bf16":
            yield line_of(value), 'mixed_precision="bf16"', 'write mixed_precision="fp16"'
        elif isinstance(value, ast.IfExp) and _asks_torch(script, value.test):
            yield (
                line_of(value),
                f"{shown(value.test)} is True with emulation",
                ("ask torch.cuda.get_device_capability()[0] >= 8"),
            )
    for call in script.calls("from_pretrained", "from_config", "autocast", "to"):
        value = keyword(call, "dtype", "torch_dtype")
        if value is None and script.called(call) in ("autocast", "to"):
            value = next((each for each in call.args if _is_dtype(script, each, "bfloat16")), None)
        if value is not None and _is_dtype(script, value, "bfloat16") and _untested(script, call):
            yield line_of(value), f"{shown(call.func)} with bfloat16", "use torch.float16 with a GradScaler, or float32"
    for call in script.calls("bfloat16"):
        if isinstance(call.func, ast.Attribute) and not call.args and _untested(script, call):
            yield line_of(call), shown(call), "train float32 weights with fp16=True"


def _asks_torch(script: Script, node: ast.expr) -> bool:
    """Whether a condition is nothing but torch.cuda.is_bf16_supported()."""
    return any(
        isinstance(origin.node, ast.Call)
        and script.called(origin.node) in ("is_bf16_supported", "is_torch_bf16_gpu_available")
        and keyword(origin.node, "including_emulation") is None
        and not origin.node.args
        for origin in script.origins(node)
    )


def _is_dtype(script: Script, node: ast.expr, name: str) -> bool:
    origins = script.origins(node)
    return len(origins) == 1 and (
        dotted(origins[0].node) == f"torch.{name}"
        or (isinstance(origins[0].node, ast.Constant) and origins[0].node.value == name)
    )


@rule(
    "script-fp16-weights",
    "error",
    "script",
    bad=GOOD.replace(
        'from_pretrained("t5-small")\n    model.', 'from_pretrained("t5-small", dtype="float16")\n    model.'
    ),
    good=GOOD,
    link="huggingface/transformers#23165",
)
def fp16_weights(document: Document, context: Context) -> Iterator[Problem]:
    """Mixed precision in fp16 needs float32 weights: with weights loaded in fp16 the gradient scaler ends with
    "Attempting to unscale FP16 gradients." at the first step."""
    script = script_of(document)
    if script is None or re.search(r"deepspeed|peft|lora|fsdp|bitsandbytes|load_in_|quantization", script.text, re.I):
        return
    recast = any(isinstance(call.func, ast.Attribute) for call in script.calls("float", "requires_grad_"))
    if recast or not _scales(script):
        return
    for call in script.calls("from_pretrained"):
        value = keyword(call, "dtype", "torch_dtype")
        if value is not None and _is_dtype(script, value, "float16") and _is_trained_call(script, call):
            yield Problem(
                line_of(value),
                f"the model is loaded in {shown(value)} and trained with fp16 mixed precision: ValueError Attempting "
                "to unscale FP16 gradients",
                "write dtype=torch.float32; autocast makes the fp16",
            )
    for call in script.calls("half"):
        if _is_trained(script, receiver(call)):
            yield Problem(
                line_of(call),
                f"{shown(call)} and fp16 mixed precision: ValueError Attempting to unscale FP16 gradients",
                "delete it; autocast makes the fp16",
            )


def _scales(script: Script) -> bool:
    for given in arguments_calls(script):
        entry = given.get("fp16")
        if entry is not None and script.constant(entry.value) is True:
            return True
    if any(script.constant(keyword(call, "mixed_precision")) == "fp16" for call in script.calls("Accelerator")):
        return True
    return bool(script.calls("GradScaler")) and bool(script.training_loops)


def _is_trained_call(script: Script, call: ast.Call) -> bool:
    """Whether what a call loads is handed to a Trainer, to prepare or to an optimizer."""
    values = [training.get("model", 0) for training in trainings(script)]
    values += [each for prepare in script.accelerator_calls("prepare") for each in prepare.args]
    values += [receiver(each) for each in script.calls("parameters")]
    return any(origin.node is call for value in values for origin in script.origins(value))


def _is_trained(script: Script, node: ast.expr | None) -> bool:
    return any(
        isinstance(origin.node, ast.Call) and _is_trained_call(script, origin.node) for origin in script.origins(node)
    )


@rule(
    "script-attention",
    "error",
    "script",
    bad=GOOD.replace(
        'T5ForConditionalGeneration.from_pretrained("t5-small")',
        'T5ForConditionalGeneration.from_pretrained("t5-small", attn_implementation="flash_attention_2")',
    ),
    good=GOOD,
    link="Dao-AILab/flash-attention#228",
)
def attention(document: Document, context: Context) -> Iterator[Problem]:
    """flash-attn 2 needs compute capability 8.0, and T5 has no form for it: its position bias is a learned mask.
    Loading ends with a ValueError."""
    script = script_of(document)
    if script is None:
        return
    for call in script.calls("from_pretrained", "from_config"):
        value = keyword(call, "attn_implementation")
        if value is not None and str(script.constant(value)).startswith("flash_attention"):
            old, t5 = context.gpu.capability < (8, 0), is_t5(script)
            if old or t5:
                why = "T5 does not support it" if t5 else f"{context.gpu.name} cannot run it (8.0 is needed)"
                yield Problem(
                    line_of(value), f"attn_implementation {shown(value)}: {why}", 'write "sdpa", or leave it out'
                )


@rule(
    "script-tf32",
    "error",
    "script",
    bad=GOOD.replace("fp16=True,", "fp16=True,\n        tf32=True,"),
    good=GOOD,
    link="ValueError in transformers 5 below compute capability 8.0",
)
def tf32(document: Document, context: Context) -> Iterator[Problem]:
    """TF32 exists from compute capability 8.0 on; before, TrainingArguments(tf32=True) ends with a ValueError."""
    script = script_of(document)
    if script is None or context.gpu.capability >= (8, 0):
        return
    for given in arguments_calls(script):
        entry = given.get("tf32")
        if entry is not None and script.constant(entry.value) is True:
            yield Problem(entry.line, f"tf32=True, but {context.gpu.name} has no TF32: ValueError", "delete it")


@rule(
    "script-device-map",
    "error",
    "script",
    bad=GOOD.replace(
        'T5ForConditionalGeneration.from_pretrained("t5-small")',
        'T5ForConditionalGeneration.from_pretrained("t5-small", device_map="auto")',
    ),
    good=GOOD,
    link="ValueError in accelerate 1.15.0",
)
def device_map(document: Document, context: Context) -> Iterator[Problem]:
    """device_map="auto" spreads one model over all GPUs; in a run with one process per GPU accelerate refuses to train
    it."""
    script = script_of(document)
    if script is None:
        return
    for call in script.calls("from_pretrained"):
        value = keyword(call, "device_map")
        if value is not None and script.constant(value) in ("auto", "balanced") and _is_trained_call(script, call):
            yield Problem(
                line_of(value),
                f"device_map={shown(value)} for a model that is trained: ValueError as soon as there are 2 processes",
                "leave device_map out",
            )


@rule(
    "script-precision-forgotten",
    "warning",
    "script",
    bad=GOOD.replace("def main():\n", 'def main():\n    accelerator = Accelerator(mixed_precision="fp16")\n').replace(
        "        fp16=True,\n", ""
    ),
    good=GOOD,
    link="transformers 5: TrainingArguments resets the state (source)",
)
def precision_forgotten(document: Document, context: Context) -> Iterator[Problem]:
    """TrainingArguments resets what an Accelerator made before it has set: without fp16=True of its own, and none in
    the launch, the Trainer trains in float32."""
    script = script_of(document)
    if script is None or "use_configured_state" in script.text:
        return
    for call in script.calls("Accelerator"):
        if script.constant(keyword(call, "mixed_precision")) != "fp16":
            continue
        for training in trainings(script):
            arguments = training.arguments
            if arguments is not None and not (arguments.get("fp16") or arguments.get("bf16")):
                yield Problem(
                    line_of(call),
                    'Accelerator(mixed_precision="fp16") is forgotten when TrainingArguments is made '
                    f"(line {line_of(arguments.call)}), which has no fp16: the Trainer takes the launch's precision",
                    "write fp16=True in TrainingArguments",
                )
