"""Rules over DeepSpeed configs, alone and beside the accelerate config or the training arguments of the same run."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Edit, Problem, rule
from scaletool.doctor.rules.arguments import Given, given
from scaletool.doctor.schemas import schemas

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "min_loss_scale": 1},
}


def example(**changes: Any) -> str:
    """The base with top-level keys replaced, None for taken away, and `block__key` for one key of a block."""
    data = json.loads(json.dumps(BASE))
    for name, value in changes.items():
        block, _, key = name.partition("__")
        target = data.setdefault(block, {}) if key else data
        if value is None:
            target.pop(key or block)
        else:
            target[key or block] = value
    return json.dumps(data, indent=2)


GOOD = example()
MICRO_BATCH, BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"


def block(config: Document, key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def enabled(config: Document, name: str) -> Any:
    """The switch of a precision block: true, false, "auto", or None where there is no block."""
    return block(config, name).get("enabled", False) if isinstance(config.get(name), dict) else None


def stage(config: Document) -> int | None:
    value = config.get("zero_optimization.stage")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def device(config: Document, key: str) -> str | None:
    """Where something is offloaded to; None for nowhere."""
    value = config.get(f"zero_optimization.{key}.device")
    return value if isinstance(value, str) and value not in ("none", "auto") else None


def whole(config: Document, key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@rule(
    "deepspeed-unknown-key",
    "error",
    "deepspeed",
    bad=example(zero_optimization=None, zero_optimisation={"stage": 2}),
    good=GOOD,
    link="DeepSpeed 0.19.8 accepts unknown top-level keys",
)
def unknown_key(config: Document, context: Context) -> Iterator[Problem]:
    """DeepSpeed accepts unknown top-level keys silently: a misspelt block has no effect, and defaults apply."""
    known = schemas().deepspeed
    for key, value in config.data.items():
        if key in known or str(key).startswith("_") or "comment" in str(key).lower():
            continue
        near = [name for name in difflib.get_close_matches(str(key), known, 3, 0.8) if name not in config.data]
        if near:
            effect = "without it there is no ZeRO" if near[0] == "zero_optimization" else "the default applies"
            message = f"{key} is no key of DeepSpeed and has no effect: {effect}"
            yield Problem(key, message, f"write {near[0]}", (Edit("rename", key, near[0]),))
        elif key in schemas().zero:
            message = f"{key} belongs into zero_optimization; at the top it has no effect"
            yield Problem(key, message, "move it there")
        elif not isinstance(value, dict):
            yield Problem(key, f"{key} ({value!r}) is no key that DeepSpeed reads", "delete it", severity="info")


@rule(
    "deepspeed-unknown-nested-key",
    "error",
    "deepspeed",
    bad=example(zero_optimization__reduce_buket_size=200000000),
    good=example(zero_optimization__reduce_bucket_size=200000000),
    link="ValidationError in DeepSpeed 0.19.8",
)
def unknown_nested_key(config: Document, context: Context) -> Iterator[Problem]:
    """The blocks zero_optimization, fp16 and bf16 refuse keys that they do not know, when the engine is built."""
    known = schemas()
    blocks = {
        "zero_optimization": known.zero,
        "fp16": known.fp16,
        "bf16": known.bf16,
        "zero_optimization.offload_optimizer": known.offload,
        "zero_optimization.offload_param": known.offload,
    }
    for name, keys in blocks.items():
        for key in block(config, name):
            if key in keys:
                continue
            near = difflib.get_close_matches(str(key), keys, 1, 0.7)
            fix = f"did you mean {near[0]}?" if near else "delete it"
            full = f"{name}.{key}"
            edit = Edit("rename", full, near[0]) if near else Edit("delete", full)
            yield Problem(
                full,
                f"{key} is no key of {name.split('.')[-1]} in DeepSpeed {known.versions['deepspeed']}",
                fix,
                (edit,),
            )


@rule(
    "deepspeed-two-precisions",
    "error",
    "deepspeed",
    bad=example(bf16={"enabled": True}),
    good=GOOD,
    link="AssertionError in DeepSpeed 0.19.8",
)
def two_precisions(config: Document, context: Context) -> Iterator[Problem]:
    """Two half precisions at once are refused."""
    if enabled(config, "fp16") is True and enabled(config, "bf16") is True:
        drop = "fp16" if context.gpu.has_bf16 else "bf16"
        message = "fp16.enabled and bf16.enabled are both true"
        yield Problem("bf16.enabled", message, f"drop {drop}", (Edit("set", f"{drop}.enabled", False),))


@rule(
    "deepspeed-bf16",
    "error",
    "deepspeed",
    bad=example(fp16=None, bf16={"enabled": True}),
    good=GOOD,
    link="pytorch/pytorch#124996",
)
def bf16(config: Document, context: Context) -> Iterator[Problem]:
    """A V100 has no bf16 units; DeepSpeed asks torch, which says yes and emulates them, slower than float32."""
    if enabled(config, "bf16") is True and enabled(config, "fp16") is not True and not context.gpu.has_bf16:
        message = f"bf16.enabled on a {context.gpu.name}, which has no bf16 units: they are emulated"
        yield Problem("bf16.enabled", message, 'write "fp16": {"enabled": true} in its place')


@rule(
    "deepspeed-full-precision",
    "warning",
    "deepspeed",
    bad=example(fp16=None),
    good=GOOD,
)
def full_precision(config: Document, context: Context) -> Iterator[Problem]:
    """Without fp16 everything runs in float32: an eighth of a V100's peak, and twice the bytes to send."""
    if any(enabled(config, name) in (True, "auto") for name in ("fp16", "bf16")) or "torch_autocast" in config.data:
        return
    if any(isinstance(block(config, name).get("enabled"), str) for name in ("fp16", "bf16")):
        return  # a switch written as text is another rule's
    missing = "fp16.enabled is false" if "fp16" in config.data else "there is no fp16 block"
    message = f"{missing}: precision is float32, which a V100 computes at an eighth of its fp16 peak"
    fix = 'write "fp16": {"enabled": true}, or "auto" where Trainer or accelerate fills it in'
    yield Problem("fp16", message, fix, (Edit("set", "fp16.enabled", True),))


@rule(
    "deepspeed-no-zero",
    "warning",
    "deepspeed",
    bad=example(zero_optimization=None),
    good=GOOD,
)
def no_zero(config: Document, context: Context) -> Iterator[Problem]:
    """Without zero_optimization, or at stage 0, every GPU holds everything, as under DDP."""
    if "zero_optimization" in config.data and stage(config) != 0:
        return
    if (
        any(difflib.get_close_matches(str(key), ["zero_optimization"], 1, 0.8) for key in config.data)
        and stage(config) != 0
    ):
        return
    found = "stage is 0" if stage(config) == 0 else "there is no zero_optimization block"
    yield Problem("zero_optimization", f"{found}: nothing is sharded", "set a stage, or use DDP, which is faster then")


@rule(
    "deepspeed-text-for-value",
    "error",
    "deepspeed",
    bad=example(gradient_accumulation_steps="2"),
    good=GOOD,
    link="TypeError in DeepSpeed 0.19.8",
)
def text_for_value(config: Document, context: Context) -> Iterator[Problem]:
    """A number or boolean in quotes is a text; only "auto" is understood, where Trainer or accelerate fills it in."""
    for key, value in _leaves(config.data):
        if not isinstance(value, str) or value == "auto" or key.startswith(("optimizer.type", "scheduler.type")):
            continue
        parsed = _parsed(value)
        if parsed is not None:
            message = f"{key} is the text {value!r}, a {'boolean' if isinstance(parsed, bool) else 'number'} is needed"
            yield Problem(key, message, f"write {json.dumps(parsed)}, without quotes", (Edit("set", key, parsed),))


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _parsed(text: str) -> Any:
    """The number or boolean that a text spells, or None."""
    try:
        value = json.loads(text.strip().lower())
    except ValueError:
        return None
    return value if isinstance(value, bool | int | float) else None


@rule(
    "deepspeed-batch-product",
    "warning",
    "deepspeed",
    bad=example(train_batch_size=20),
    good=example(train_batch_size="auto"),
    link="deepspeedai/DeepSpeed#6914",
)
def batch_product(config: Document, context: Context) -> Iterator[Problem]:
    """train_batch_size = micro-batch x accumulation x processes. All three written down fit one number of processes;
    at any other the engine ends with an AssertionError."""
    total, micro, accumulation = (whole(config, key) for key in (BATCH, MICRO_BATCH, ACCUMULATION))
    world = _world_size(context)
    if total and world and (micro or accumulation):
        known = (micro or 1) * (accumulation or 1)
        exact = micro and accumulation
        if total != known * world if exact else total % (known * world):
            message = f"{BATCH} {total} is not {_product(micro, accumulation)} x {world} processes ({known * world})"
            yield Problem(
                BATCH, message, f'set {known * world}, or "auto"', (Edit("set", BATCH, "auto"),), severity="error"
            )
        return
    if not (total and micro and accumulation):
        if total and not micro and not accumulation and world and total % world:
            message = f"{BATCH} {total} cannot be shared by {world} processes"
            yield Problem(BATCH, message, f"set a multiple of {world}", severity="error")
        return
    fits = [count for count in context.counts if total == micro * accumulation * count]
    others = [count for count in context.counts if count not in fits]
    if others:
        only = f"fits {fits[0]} process{'es' * (fits[0] != 1)} only" if fits else "fits no number of processes among"
        listed = "" if fits else f" {', '.join(map(str, context.counts))}"
        needed = ", ".join(f"{micro * accumulation * count} on {count}" for count in others)
        message = f"{BATCH} {total} = {MICRO_BATCH} {micro} x {ACCUMULATION} {accumulation} x processes {only}{listed}"
        yield Problem(
            BATCH, message, f'write "auto", or delete it; it would be {needed}', (Edit("set", BATCH, "auto"),)
        )


def _product(micro: int | None, accumulation: int | None) -> str:
    parts = [f"{name} {value}" for name, value in ((MICRO_BATCH, micro), (ACCUMULATION, accumulation)) if value]
    return " x ".join(parts)


def _world_size(context: Context) -> int | None:
    if "world_size" in context.facts:
        return int(context.facts["world_size"])
    counts = [whole(config, "num_processes") for config in context.of("accelerate")]
    return counts[0] if counts else None


@rule(
    "deepspeed-stage",
    "error",
    "deepspeed",
    bad=example(zero_optimization={"stage": 4}),
    good=GOOD,
    link="ValidationError in DeepSpeed 0.19.8",
)
def unknown_stage(config: Document, context: Context) -> Iterator[Problem]:
    """There are the stages 0 to 3, and the block is a mapping; the engine refuses others when it is built."""
    value = config.get("zero_optimization.stage")
    if value is not None and not isinstance(value, str) and (isinstance(value, bool) or value not in (0, 1, 2, 3)):
        yield Problem("zero_optimization.stage", f"stage is {value!r}", "write 0, 1, 2 or 3")
    if "zero_optimization" in config.data and not isinstance(config.get("zero_optimization"), dict):
        message = f"zero_optimization is {config.get('zero_optimization')!r}, not a block"
        yield Problem("zero_optimization", message, 'write {"stage": 2}')


@rule(
    "deepspeed-keys-of-stage-3",
    "warning",
    "deepspeed",
    bad=example(zero_optimization__offload_param={"device": "cpu"}),
    good=example(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}),
    link="wenet-e2e/wenet#2499",
)
def keys_of_stage_3(config: Document, context: Context) -> Iterator[Problem]:
    """Parameters are sharded and offloaded in stage 3 only; below, these keys are accepted and have no effect."""
    here = stage(config)
    if here is None or here == 3:
        return
    found = [key for key in block(config, "zero_optimization") if str(key).startswith("stage3_")]
    if device(config, "offload_param"):
        found.append("offload_param")
    if found:
        edits = tuple(Edit("delete", f"zero_optimization.{key}") for key in found)
        message = f"{', '.join(found)}: no effect in stage {here}, only in stage 3"
        yield Problem(f"zero_optimization.{found[0]}", message, "delete them, or set stage 3", edits)


@rule(
    "deepspeed-offload-optimizer",
    "warning",
    "deepspeed",
    bad=example(zero_optimization__offload_optimizer={"device": "cpu"}),
    good=example(
        zero_optimization__offload_optimizer={"device": "cpu"}, optimizer={"type": "AdamW", "params": {"lr": 1e-4}}
    ),
    link="deepspeedai/DeepSpeed#2971, #7524",
)
def offload_optimizer(config: Document, context: Context) -> Iterator[Problem]:
    """An offloaded optimizer wants DeepSpeedCPUAdam. A script's own AdamW is refused, or runs on the CPU slowly."""
    if not device(config, "offload_optimizer") or "optimizer" in config.data:
        return
    if config.get("zero_force_ds_cpu_optimizer") is False or (stage(config) or 0) < 1:
        return
    message = "offload_optimizer without an optimizer block: a script's own AdamW is refused by the engine"
    fix = "use DeepSpeedCPUAdam in the script, an optimizer block here, or zero_force_ds_cpu_optimizer: false"
    yield Problem("zero_optimization.offload_optimizer", message, fix)


@rule(
    "deepspeed-old-offload",
    "warning",
    "deepspeed",
    bad=example(zero_optimization__cpu_offload=True, optimizer={"type": "AdamW"}),
    good=GOOD,
    link="deprecated in DeepSpeed",
)
def old_offload(config: Document, context: Context) -> Iterator[Problem]:
    """cpu_offload and its kin are old names."""
    for key, new in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_params", "offload_param"),
        ("cpu_offload_param", "offload_param"),
    ):
        if block(config, "zero_optimization").get(key) is True:
            yield Problem(f"zero_optimization.{key}", f"{key} is deprecated", f'write "{new}": {{"device": "cpu"}}')


@rule(
    "deepspeed-min-loss-scale",
    "error",
    "deepspeed",
    bad=example(fp16__min_loss_scale=1e-10),
    good=GOOD,
    link="deepspeedai/DeepSpeedExamples#418, #531",
)
def min_loss_scale(config: Document, context: Context) -> Iterator[Problem]:
    """A fraction was passed on as a cure for "loss scale already at minimum"; today it has to be a whole number. A
    scale that falls to 1 means real overflow."""
    value = config.get("fp16.min_loss_scale")
    if isinstance(value, int | float) and not isinstance(value, bool) and (value < 1 or value != int(value)):
        message = f"min_loss_scale is {value}, it must be a whole number from 1"
        fix = "write 1; against real overflow: a lower learning rate, clipping, T5's feed-forward in float32"
        yield Problem("fp16.min_loss_scale", message, fix, (Edit("set", "fp16.min_loss_scale", 1),))


@rule(
    "deepspeed-fixed-loss-scale",
    "warning",
    "deepspeed",
    bad=example(fp16__loss_scale=1),
    good=GOOD,
    link="huggingface/transformers#9996",
)
def fixed_loss_scale(config: Document, context: Context) -> Iterator[Problem]:
    """A loss_scale other than 0 is fixed: at 1 small fp16 gradients vanish, at a large one every step overflows."""
    value = config.get("fp16.loss_scale")
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value != 0
        and enabled(config, "fp16") in (True, "auto")
    ):
        lost = "small fp16 gradients become 0" if value < 128 else "it never falls when gradients overflow"
        message = f"loss_scale is {value:g}, a fixed scale: {lost}"
        yield Problem("fp16.loss_scale", message, "write 0, for a dynamic scale", (Edit("set", "fp16.loss_scale", 0),))


@rule(
    "deepspeed-initial-scale",
    "warning",
    "deepspeed",
    bad=example(fp16__initial_scale_power=32),
    good=GOOD,
    link="a scale of 2^32 skips about 16 steps until it is 2^16",
)
def initial_scale(config: Document, context: Context) -> Iterator[Problem]:
    """The scale starts at two to this power, and halves at every overflow, each of which is a skipped step."""
    value = config.get("fp16.initial_scale_power")
    if isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value <= 24:
        message = (
            f"initial_scale_power is {value:g}: about {max(0, int(min(value, 200)) - 16)} steps are skipped at first"
        )
        yield Problem(
            "fp16.initial_scale_power", message, "write 12 to 16", (Edit("set", "fp16.initial_scale_power", 16),)
        )


@rule(
    "deepspeed-steps-per-print",
    "error",
    "deepspeed",
    bad=example(steps_per_print=0),
    good=example(steps_per_print=100),
    link="ZeroDivisionError in DeepSpeed 0.19.8",
)
def steps_per_print(config: Document, context: Context) -> Iterator[Problem]:
    """The engine divides by steps_per_print after every step."""
    value = config.get("steps_per_print")
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        edit = Edit("set", "steps_per_print", 1_000_000_000)
        yield Problem("steps_per_print", f"steps_per_print is {value}", "write a large number for no prints", (edit,))


@rule(
    "deepspeed-autocast",
    "error",
    "deepspeed",
    bad=example(fp16=None, torch_autocast={"enabled": True, "dtype": "float16"}),
    good=GOOD,
    link="measured with DeepSpeed 0.19.8: the scale stays at 65536, every step is skipped",
)
def autocast(config: Document, context: Context) -> Iterator[Problem]:
    """torch_autocast in fp16 never lowers its loss scale after an overflow: every later step is skipped, silently."""
    found = block(config, "torch_autocast")
    if (
        found.get("enabled") is True
        and "float16" in str(found.get("dtype"))
        and "bfloat16" not in str(found.get("dtype"))
    ):
        message = "torch_autocast in float16: after an overflow the scale stays, and every step is skipped silently"
        yield Problem("torch_autocast", message, 'use "fp16": {"enabled": true}')


@rule(
    "deepspeed-clipping-default",
    "warning",
    "deepspeed",
    bad={
        "ds.json": example(gradient_clipping=None),
        "args.json": '{"max_grad_norm": 0.5, "learning_rate": 0.0001, "fp16": true}',
    },
    good={
        "ds.json": example(gradient_clipping="auto"),
        "args.json": '{"max_grad_norm": 0.5, "learning_rate": 0.0001, "fp16": true}',
    },
    link="DeepSpeed runtime/constants.py: GRADIENT_CLIPPING_DEFAULT = 1.0",
)
def clipping_default(config: Document, context: Context) -> Iterator[Problem]:
    """DeepSpeed clips at 1.0 where nothing is said; only 0.0 in the file means no clipping."""
    if "gradient_clipping" in config.data:
        return
    for arguments in context.of("arguments"):
        norm = given(arguments, "max_grad_norm")
        if norm and norm.value != 1.0:
            message = f"gradient_clipping is missing: DeepSpeed clips at 1.0, {arguments.path} says {norm.value}"
            yield Problem("gradient_clipping", message, f'write "gradient_clipping": {norm.value}, or "auto"')


@rule(
    "deepspeed-against-arguments",
    "error",
    "deepspeed",
    bad={"ds.json": GOOD, "args.json": '{"max_grad_norm": 0.5, "learning_rate": 0.0001, "fp16": true}'},
    good={"ds.json": GOOD, "args.json": '{"max_grad_norm": 1.0, "learning_rate": 0.0001, "fp16": true}'},
    link="axolotl-ai-cloud/axolotl#1381, huggingface/transformers#12021",
)
def against_arguments(config: Document, context: Context) -> Iterator[Problem]:
    """A value in the DeepSpeed file that is not "auto" has to be the one of the training arguments; Trainer refuses
    another."""
    pairs = (
        ("gradient_clipping", "max_grad_norm"),
        (ACCUMULATION, ACCUMULATION),
        (MICRO_BATCH, "per_device_train_batch_size"),
        ("fp16.enabled", "fp16"),
        ("bf16.enabled", "bf16"),
        ("optimizer.params.lr", "learning_rate"),
        ("optimizer.params.weight_decay", "weight_decay"),
        ("scheduler.params.warmup_num_steps", "warmup_steps"),
    )
    for arguments in context.of("arguments"):
        for key, name in pairs:
            mine, other = config.get(key), given(arguments, name)
            if mine is None or other is None or mine == "auto" or not _comparable(mine, other):
                continue
            if mine != other.value:
                place = f"{arguments.path}:{arguments.line(other.key)}"
                message = f"{key} is {json.dumps(mine)} here, {name} {json.dumps(other.value)} in {place}"
                yield Problem(
                    key, message, 'write "auto" here, and the value in one place', (Edit("set", key, "auto"),)
                )


def _comparable(mine: Any, other: Given) -> bool:
    numbers = isinstance(mine, int | float) and isinstance(other.value, int | float)
    return numbers and isinstance(mine, bool) == isinstance(other.value, bool)


@rule(
    "deepspeed-against-launcher",
    "error",
    "deepspeed",
    bad={
        "ds.json": GOOD,
        "a.yaml": "distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_machines: 1\nnum_processes: 4\n",
    },
    good={
        "ds.json": GOOD,
        "a.yaml": "distributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 4\n"
        "deepspeed_config:\n  deepspeed_config_file: ds.json\n",
    },
    link="measured: nothing said",
)
def against_launcher(config: Document, context: Context) -> Iterator[Problem]:
    """An accelerate config beside it decides whether the file is read at all."""
    launchers = context.of("accelerate")
    if len(launchers) != 1 or context.of("arguments") or context.of("script"):
        return
    kind = launchers[0].get("distributed_type")
    if kind is not None and kind != "DEEPSPEED":
        message = f"{launchers[0].path} has distributed_type {kind}: this file is not read"
        yield Problem(None, message, "set distributed_type: DEEPSPEED and deepspeed_config.deepspeed_config_file")


@rule(
    "deepspeed-untested-optimizer",
    "info",
    "deepspeed",
    bad=example(optimizer={"type": "Lamb"}, zero_allow_untested_optimizer=False),
    good=example(optimizer={"type": "AdamW"}),
)
def untested_optimizer(config: Document, context: Context) -> Iterator[Problem]:
    """ZeRO takes its own list of optimizers; others need zero_allow_untested_optimizer."""
    kind = config.get("optimizer.type")
    known = ("adam", "adamw", "adagrad", "lion", "muon", "zerooneadam", "onebitadam")
    if isinstance(kind, str) and kind.lower() not in known and (stage(config) or 0) >= 1:
        if config.get("zero_allow_untested_optimizer") is not True:
            message = f"optimizer {kind} is not tested with ZeRO, and refused"
            yield Problem("optimizer.type", message, "use AdamW, or zero_allow_untested_optimizer: true")


@rule(
    "deepspeed-saved-shards",
    "info",
    "deepspeed",
    bad=example(zero_optimization={"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}),
    good=example(zero_optimization={"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}),
)
def saved_shards(config: Document, context: Context) -> Iterator[Problem]:
    """In stage 3 a saved model is whole only where its shards are gathered."""
    key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if stage(config) == 3 and config.get(key) is False:
        yield Problem(key, "a saved model holds shards, not weights", "set it to true", (Edit("set", key, True),))


@rule(
    "deepspeed-bucket-size",
    "warning",
    "deepspeed",
    bad=example(zero_optimization__reduce_bucket_size=5000),
    good=example(zero_optimization__reduce_bucket_size=50000000),
)
def bucket_size(config: Document, context: Context) -> Iterator[Problem]:
    """Buckets count elements. Tiny ones send a message per tensor; two of the gradients' dtype are held per GPU."""
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        value = config.get(f"zero_optimization.{key}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        gigabytes = value * 2 / 2**30
        if value < 1e5:
            message = f"{key} is {value:g} elements: a message for nearly every tensor"
            yield Problem(f"zero_optimization.{key}", message, 'write 2e8 or "auto"')
        elif gigabytes > context.gpu.memory / 4:
            message = f"{key} is {value:g} elements: {gigabytes:.0f} GiB a bucket in fp16, of {context.gpu.memory} GiB"
            yield Problem(f"zero_optimization.{key}", message, 'write 2e8 or "auto"')
