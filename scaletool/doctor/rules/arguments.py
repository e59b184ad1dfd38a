"""Rules over training arguments: a JSON of TrainingArguments, or a dict around them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Edit, Problem, rule
from scaletool.doctor.schemas import schemas

BLOCKS = ("hf_training_arguments", "training_arguments")
"""Where a config dict of a user's own keeps what goes to TrainingArguments."""

GOOD = """\
{
  "output_dir": "runs/a",
  "per_device_train_batch_size": 8,
  "gradient_accumulation_steps": 2,
  "num_train_epochs": 3,
  "learning_rate": 0.0001,
  "warmup_steps": 500,
  "eval_strategy": "steps",
  "eval_steps": 1000,
  "save_steps": 1000,
  "fp16": true,
  "ddp_find_unused_parameters": false
}
"""

REMOVED: dict[str, tuple[str | None, str]] = {
    "evaluation_strategy": ("eval_strategy", "write eval_strategy"),
    "overwrite_output_dir": (None, "delete it"),
    "logging_dir": (None, "delete it; the variable TENSORBOARD_LOGGING_DIR says where logs go"),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", "write per_device_train_batch_size"),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", "write per_device_eval_batch_size"),
    "no_cuda": ("use_cpu", "write use_cpu"),
    "fp16_backend": (None, "delete it: there is one way left"),
    "half_precision_backend": (None, "delete it: there is one way left"),
    "fp16_opt_level": (None, "delete it: apex is gone"),
    "sharded_ddp": (None, "delete it, and use fsdp"),
    "adafactor": ("optim", 'write optim: "adafactor"'),
    "group_by_length": ("train_sampling_strategy", 'write train_sampling_strategy: "group_by_length"'),
    "dispatch_batches": ("accelerator_config", 'write accelerator_config: {"dispatch_batches": ...}'),
    "split_batches": ("accelerator_config", 'write accelerator_config: {"split_batches": ...}'),
    "use_mps_device": (None, "delete it"),
    "use_ipex": (None, "delete it"),
    "jit_mode_eval": (None, "delete it"),
    "save_safetensors": (None, "delete it: it is the only format"),
    "push_to_hub_token": ("hub_token", "write hub_token"),
    "include_inputs_for_metrics": ("include_for_metrics", 'write include_for_metrics: ["inputs"]'),
    "warmup_ratio": ("warmup_steps", "write warmup_steps: below 1 it is the share of all steps"),
    "tpu_num_cores": (None, "delete it"),
    "past_index": (None, "delete it"),
    "ray_scope": (None, "delete it"),
}
"""Arguments that older releases had, what took their place, and what to do."""


class Given(NamedTuple):
    """A value and the dotted key under which it stands."""

    key: str
    value: Any


def given(document: Document, *names: str) -> Given | None:
    """The first of `names` that the document has, in its block of arguments or at its top."""
    for block in (*BLOCKS, ""):
        for name in names:
            key = f"{block}.{name}" if block else name
            if document.has(key):
                return Given(key, document.get(key))
    return None


def number(document: Document, *names: str) -> Given | None:
    """The same, where the value is a number."""
    found = given(document, *names)
    return found if found and isinstance(found.value, int | float) and not isinstance(found.value, bool) else None


def is_true(document: Document, name: str) -> Given | None:
    found = given(document, name)
    return found if found and found.value is True else None


def arguments_of(document: Document) -> dict[str, Any]:
    """What is handed to TrainingArguments as it stands: the block of a dict, or all where every key looks like it."""
    for block in BLOCKS:
        if isinstance(document.get(block), dict):
            return {f"{block}.{name}": value for name, value in document.get(block).items()}
    known = sum(name in schemas().training_arguments or name in REMOVED for name in document.data)
    return dict(document.data) if known >= max(2, 0.7 * len(document.data)) else {}


@rule(
    "arguments-removed",
    "error",
    "arguments",
    bad=GOOD.replace("eval_strategy", "evaluation_strategy"),
    good=GOOD,
    link="TypeError in transformers 5",
)
def removed(document: Document, context: Context) -> Iterator[Problem]:
    """Arguments that transformers 5 no longer has end in a TypeError, after the model was loaded."""
    for name, (new, fix) in REMOVED.items():
        found = given(document, name)
        if found and name not in schemas().training_arguments:
            message = f"{name} ({found.value!r}) is no argument of transformers {schemas().versions['transformers']}"
            renamed = new is not None and new.split("_")[-1] == name.split("_")[-1]
            edit = Edit("rename", found.key, new) if renamed else Edit("delete", found.key)
            yield Problem(found.key, message, fix, (edit,) if renamed or new is None else ())


@rule(
    "arguments-unknown",
    "error",
    "arguments",
    bad=GOOD.replace("learning_rate", "learning_rte"),
    good=GOOD,
    link="TypeError in transformers 5",
)
def unknown(document: Document, context: Context) -> Iterator[Problem]:
    """A name that TrainingArguments does not know ends in a TypeError."""
    known = schemas().training_arguments
    for key, value in arguments_of(document).items():
        name = key.split(".")[-1]
        if name in known or name in REMOVED:
            continue
        near = difflib.get_close_matches(name, known, 1, 0.75)
        if near or key != name:  # at the top of a dict of the user's own, other names are his own business
            fix = f"did you mean {near[0]}?" if near else "delete it, or keep it outside of the training arguments"
            edits = (Edit("rename", key, near[0]),) if near else ()
            yield Problem(key, f"{name} ({value!r}) is no argument of TrainingArguments", fix, edits)


@rule(
    "arguments-number-as-text",
    "error",
    "arguments",
    bad=GOOD.replace("0.0001", '"1e-4"'),
    good=GOOD,
    link="TypeError in transformers 5",
)
def number_as_text(document: Document, context: Context) -> Iterator[Problem]:
    """A number in quotes is a text: comparisons and the optimizer fail on it."""
    for key, value in arguments_of(document).items():
        default = schemas().training_arguments.get(key.split(".")[-1])
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if is_number and isinstance(value, str) and _as_number(value) is not None:
            yield Problem(
                key, f"{key} is the text {value!r}", "write it without quotes", (Edit("set", key, _as_number(value)),)
            )


def _as_number(text: str) -> float | int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() and "e" not in text.lower() and "." not in text else value


@rule(
    "arguments-steps-times-world",
    "error",
    "arguments",
    bad='{"num_epochs": 2, "batches_per_process": 500, "world_size": 8, "max_steps": 8000}',
    good='{"num_epochs": 2, "batches_per_process": 500, "world_size": 8, "max_steps": 1000}',
    link="forum thread: 406,536 steps where 101,634 were needed",
)
def steps_times_world(document: Document, context: Context) -> Iterator[Problem]:
    """max_steps counts optimizer steps of the whole world: one step takes a batch on every process. Counted over all
    processes, the run is as many times too long as there are processes."""
    steps, epochs = number(document, "max_steps"), number(document, "num_epochs", "num_train_epochs", "epochs")
    if not steps or steps.value <= 0 or not epochs or epochs.value <= 0:
        return
    batches = _batches_per_process(document, context)
    accumulation = _positive(number(document, "gradient_accumulation_steps"), 1)
    if batches is None:
        per_epoch = number(document, "batches_per_epoch", "steps_per_epoch")
        if per_epoch and steps.value == epochs.value * per_epoch.value:
            yield Problem(
                steps.key,
                f"max_steps {steps.value:,} is {epochs.value:g} x {per_epoch.value:,} ({per_epoch.key}); right only if "
                "that counts the batches of ONE process: a step takes one batch on every process",
                "look up the batches one process reads in an epoch (len of its prepared loader, or the count that its "
                "log ends with) and give it: --set facts.batches_per_process=N",
                severity="info",
            )
        return
    needed = math.ceil(epochs.value * math.ceil(batches / accumulation))
    factor = steps.value / needed
    world = _world_size(document, context)
    times_world = world is not None and world > 1 and math.isclose(factor, world, rel_tol=0.02)
    whole = factor > 1.5 and math.isclose(factor, round(factor), rel_tol=0.005)
    if not times_world and not whole:
        return
    count = f"the {world} processes" if times_world else "a count over several processes"
    per_accumulation = f" / {accumulation} accumulated" if accumulation > 1 else ""
    late = [
        f"{name} {every.value:,}"
        for name in ("eval_steps", "save_steps")
        if (every := number(document, name)) and every.value > needed
    ]
    never = f"; {' and '.join(late)} would then never come" if late else ""
    yield Problem(
        steps.key,
        f"max_steps is {steps.value:,}, which is {factor:.3g} x the {needed:,} steps that {epochs.value:g} epochs need "
        f"({epochs.value:g} x {batches:,} batches per process{per_accumulation}): {count} went into it, so the run "
        f"would train {epochs.value * factor:.3g} epochs",
        f"set max_steps: {needed}, or leave it out and set num_train_epochs where the data has a length{never}",
        (Edit("set", steps.key, needed),),
    )
    yield Problem(
        steps.key,
        "what a step itself costs more or less than in another loop cannot be known from files: it may lie in "
        "arguments that are not here (accumulation, bf16, checkpointing), in callbacks, or in the machine",
        "measure it: scaletool sweep --modes custom,trainer",
        severity="info",
    )


def _batches_per_process(document: Document, context: Context) -> int | None:
    if "batches_per_process" in context.facts:
        return int(context.facts["batches_per_process"])
    found = number(document, "batches_per_process", "batches_per_rank", "batches_per_gpu")
    if found and found.value > 0:
        return int(found.value)
    rows, batch = context.facts.get("rows"), number(document, "per_device_train_batch_size")
    world = _world_size(document, context)
    if rows and world and batch and batch.value > 0:
        return math.ceil(int(rows) / (int(batch.value) * world))
    return None


def _world_size(document: Document, context: Context) -> int | None:
    """Processes of the run: a fact, the document's own word, or the accelerate config's beside it."""
    if "world_size" in context.facts:
        return int(context.facts["world_size"])
    for candidate in (number(document, "world_size", "num_processes"), *_launch_counts(context)):
        if candidate and candidate.value > 0:
            return int(candidate.value)
    return None


def _launch_counts(context: Context) -> Iterator[Given | None]:
    for config in context.of("accelerate"):
        yield number(config, "num_processes")


def _positive(found: Given | None, default: int) -> int:
    return int(found.value) if found and found.value >= 1 else default


@rule(
    "arguments-never-due",
    "warning",
    "arguments",
    bad=GOOD.replace('"num_train_epochs": 3', '"max_steps": 900'),
    good=GOOD.replace('"num_train_epochs": 3', '"max_steps": 9000'),
)
def never_due(document: Document, context: Context) -> Iterator[Problem]:
    """An evaluation or a checkpoint that is due after the last step never comes."""
    steps = number(document, "max_steps")
    for name, strategy in (("eval_steps", "eval_strategy"), ("save_steps", "save_strategy")):
        every, how = number(document, name), given(document, strategy)
        in_steps = how.value == "steps" if how else name == "save_steps"
        if steps and every and in_steps and every.value > steps.value > 0:
            message = f"{name} is {every.value:,}, but the run ends after max_steps {steps.value:,}"
            yield Problem(every.key, message, f"set {name} well below {steps.value:,}")


@rule(
    "arguments-warmup-too-long",
    "warning",
    "arguments",
    bad=GOOD.replace('"num_train_epochs": 3', '"max_steps": 400').replace("1000", "100"),
    good=GOOD.replace('"num_train_epochs": 3', '"max_steps": 9000'),
)
def warmup_too_long(document: Document, context: Context) -> Iterator[Problem]:
    """Where warm-up takes the whole run, the learning rate never reaches its value."""
    steps, warmup = number(document, "max_steps"), number(document, "warmup_steps")
    if steps and warmup and warmup.value >= steps.value > 0:
        message = f"warmup_steps is {warmup.value:,} of max_steps {steps.value:,}: the rate only ever rises"
        yield Problem(warmup.key, message, f"set warmup_steps to about {max(1, int(steps.value) // 20)}")


@rule(
    "arguments-bf16",
    "error",
    "arguments",
    bad=GOOD.replace('"fp16"', '"bf16"'),
    good=GOOD,
    link="huggingface/accelerate#1693, pytorch/pytorch#124996",
)
def bf16(document: Document, context: Context) -> Iterator[Problem]:
    """A V100 has no bf16 units; torch says that it supports them, emulates them, and transformers, accelerate and
    DeepSpeed believe it. bf16 in the arguments wins over the launcher's fp16."""
    for name in ("bf16", "bf16_full_eval"):
        found = is_true(document, name)
        if found and not context.gpu.has_bf16:
            message = f"{name} on a {context.gpu.name}, which has no bf16 units: it is emulated, slower than float32"
            edit = Edit("rename", found.key, name.replace("bf16", "fp16"))
            yield Problem(found.key, message, f"write {name.replace('bf16', 'fp16')}: true", (edit,))


@rule(
    "arguments-tf32",
    "error",
    "arguments",
    bad=GOOD.replace('"fp16": true', '"fp16": true,\n  "tf32": true'),
    good=GOOD,
    link="ValueError in transformers 5",
)
def tf32(document: Document, context: Context) -> Iterator[Problem]:
    """TF32 needs Ampere or later; TrainingArguments refuses it elsewhere."""
    found = is_true(document, "tf32")
    if found and context.gpu.capability < (8, 0):
        yield Problem(found.key, f"tf32 on a {context.gpu.name}", "delete it", (Edit("delete", found.key),))


@rule(
    "arguments-two-precisions",
    "error",
    "arguments",
    bad=GOOD.replace('"fp16": true', '"fp16": true,\n  "bf16": true'),
    good=GOOD,
    link="ValueError in transformers 5",
)
def two_precisions(document: Document, context: Context) -> Iterator[Problem]:
    """Two half precisions at once are refused."""
    if is_true(document, "fp16") and (found := is_true(document, "bf16")):
        fix = "keep one" if context.gpu.has_bf16 else "delete bf16"
        yield Problem(found.key, "fp16 and bf16 are both true", fix, (Edit("delete", found.key),))


HALF = ("float16", "fp16", "half", "torch.float16")


@rule(
    "arguments-half-weights",
    "error",
    "arguments",
    bad='{"torch_dtype": "float16", "fp16": true, "learning_rate": 0.0001}',
    good='{"torch_dtype": "float32", "fp16": true, "learning_rate": 0.0001}',
    link="huggingface/transformers#23165",
)
def half_weights(document: Document, context: Context) -> Iterator[Problem]:
    """fp16 training keeps float32 weights. Weights that were loaded in fp16 end at the first step: "Attempting to
    unscale FP16 gradients"."""
    loaded = given(document, "dtype", "torch_dtype", "model_dtype")
    if loaded and loaded.value in HALF and is_true(document, "fp16"):
        message = f"weights are loaded in {loaded.value} and trained with fp16: the scaler refuses fp16 gradients"
        yield Problem(loaded.key, message, "load in float32", (Edit("set", loaded.key, "float32"),))


@rule(
    "arguments-fp16-full-eval",
    "warning",
    "arguments",
    bad=GOOD.replace('"fp16": true', '"fp16": true,\n  "fp16_full_eval": true'),
    good=GOOD,
    link="huggingface/transformers#10956",
)
def fp16_full_eval(document: Document, context: Context) -> Iterator[Problem]:
    """Evaluation in fp16 weights overflows in the feed-forward layers of several T5 checkpoints, and gives NaN."""
    if found := is_true(document, "fp16_full_eval"):
        message = "fp16_full_eval casts T5 to fp16 for evaluation, where its feed-forward layers can overflow to NaN"
        yield Problem(
            found.key, message, "delete it: fp16 alone evaluates in mixed precision", (Edit("delete", found.key),)
        )


@rule(
    "arguments-pad-to-maximum",
    "warning",
    "arguments",
    bad='{"padding": "max_length", "max_length": 256, "per_device_train_batch_size": 8}',
    good='{"padding": "longest", "max_length": 256, "per_device_train_batch_size": 8}',
    link="the thread this tool started from",
)
def pad_to_maximum(document: Document, context: Context) -> Iterator[Problem]:
    """Rows padded to the maximum cost as much as the longest row there can be."""
    padding = given(document, "padding")
    length = number(document, "max_length", "max_source_length")
    if not padding or padding.value != "max_length" or not length or length.value <= 0:
        return
    typical = number(document, "typical_source_tokens")
    tokens = context.facts.get("source_tokens") or (typical.value if typical else None)
    share = ""
    if tokens and tokens < length.value:
        share = f"; rows of {tokens:g} tokens are {1 - tokens / length.value:.0%} padding"
    message = f"padding is max_length: every row is padded to {length.value:g} tokens{share}"
    fix = "pad to the longest of the batch, in multiples of 8: padding: longest, pad_to_multiple_of: 8"
    yield Problem(padding.key, message, fix, (Edit("set", padding.key, "longest"),))


@rule(
    "arguments-best-model",
    "error",
    "arguments",
    bad=GOOD.replace('"fp16": true', '"load_best_model_at_end": true,\n  "save_strategy": "epoch",\n  "fp16": true'),
    good=GOOD.replace('"fp16": true', '"load_best_model_at_end": true,\n  "save_strategy": "steps",\n  "fp16": true'),
    link="ValueError in transformers 5",
)
def best_model(document: Document, context: Context) -> Iterator[Problem]:
    """To load the best model, every evaluated state must have been saved: the strategies have to be the same, and
    save_steps a multiple of eval_steps."""
    found = is_true(document, "load_best_model_at_end")
    evaluates, saves = given(document, "eval_strategy"), given(document, "save_strategy")
    if not found or not evaluates:
        return
    how = saves.value if saves else "steps"
    if evaluates.value != how and "best" not in (evaluates.value, how):
        message = f"load_best_model_at_end with eval_strategy {evaluates.value} and save_strategy {how}"
        yield Problem(found.key, message, f"set save_strategy: {evaluates.value}")
    eval_steps, save_steps = number(document, "eval_steps"), number(document, "save_steps")
    if how == evaluates.value == "steps" and eval_steps and save_steps and eval_steps.value >= 1:
        if save_steps.value % eval_steps.value:
            message = f"save_steps {save_steps.value} is no multiple of eval_steps {eval_steps.value}"
            yield Problem(save_steps.key, message, "make it one, for load_best_model_at_end")


@rule(
    "arguments-unused-search",
    "warning",
    "arguments",
    bad=GOOD.replace('unused_parameters": false', 'unused_parameters": true'),
    good=GOOD,
    link="huggingface/transformers#9802",
)
def unused_search(document: Document, context: Context) -> Iterator[Problem]:
    """T5 with labels uses all its parameters. The search for unused ones took 11 to 15% of a step of a small T5."""
    if found := is_true(document, "ddp_find_unused_parameters"):
        message = "ddp_find_unused_parameters is true: every step is searched, 11 to 15% of a small T5's step"
        yield Problem(found.key, message, "set it to false", (Edit("set", found.key, False),))


@rule(
    "arguments-two-engines",
    "error",
    "arguments",
    bad=GOOD.replace('"fp16": true', '"deepspeed": "ds.json",\n  "fsdp": "full_shard",\n  "fp16": true'),
    good=GOOD,
    link="ValueError in transformers 5",
)
def two_engines(document: Document, context: Context) -> Iterator[Problem]:
    """DeepSpeed and FSDP cannot both shard one model."""
    deepspeed, fsdp = given(document, "deepspeed"), given(document, "fsdp")
    if deepspeed and fsdp and deepspeed.value and fsdp.value:
        yield Problem(fsdp.key, "deepspeed and fsdp are both set", "keep one of them")


@rule(
    "arguments-flash-attention",
    "error",
    "arguments",
    bad='{"attn_implementation": "flash_attention_2", "learning_rate": 0.0001, "fp16": true}',
    good='{"attn_implementation": "sdpa", "learning_rate": 0.0001, "fp16": true}',
    link="Dao-AILab/flash-attention#228",
)
def flash_attention(document: Document, context: Context) -> Iterator[Problem]:
    """FlashAttention needs Ampere or later, and has no place for T5's position bias: transformers refuses it."""
    found = given(document, "attn_implementation")
    if found and isinstance(found.value, str) and found.value.startswith("flash_attention"):
        message = f"attn_implementation is {found.value}: T5 has a position bias, which it cannot take"
        yield Problem(found.key, message, "use sdpa", (Edit("set", found.key, "sdpa"),))


@rule(
    "arguments-accumulation-elsewhere",
    "error",
    "arguments",
    bad={
        "args.json": GOOD,
        "accelerate.yaml": "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: fp16\n"
        "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 8\n",
    },
    good={
        "args.json": GOOD,
        "accelerate.yaml": "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: fp16\n"
        "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 2\n  gradient_clipping: 1.0\n",
    },
    link="huggingface/accelerate, utils/launch.py",
)
def accumulation_elsewhere(document: Document, context: Context) -> Iterator[Problem]:
    """DeepSpeed accumulates as the accelerate config says, a loop or Trainer as the arguments say: two counts in one
    run step at the wrong places."""
    own = number(document, "gradient_accumulation_steps")
    for config in context.of("accelerate"):
        other = number(config, "deepspeed_config.gradient_accumulation_steps")
        if own and other and own.value != other.value:
            place = f"{config.path}:{config.line(other.key)}"
            message = f"gradient_accumulation_steps is {own.value} here, {other.value} for the engine in {place}"
            yield Problem(own.key, message, "write the same number in both")
