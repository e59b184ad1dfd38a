"""Rules over the values of a run config: one function per rule, all found in RULES.

The loader has refused unknown keys and wrong types by now; a rule refuses what no run can use.
The entrypoint and the driver call `refuse_errors` before anything heavy is imported.
"""

from __future__ import annotations

import glob
import math
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scaletool.config import HUB_NAME, LoadedConfig, RunConfig
from scaletool.errors import ConfigError

Severity = Literal["error", "warning", "info"]
Problem = tuple[str, str, str]
"""(key, message, fix); the message holds the value."""

SEEDS = 2**32
"""numpy takes seeds below this."""


MANY, MOST_WORKERS = 2**20, 256
"""Far beyond what a GPU or a node can use: a slip of the finger, which would fill the memory."""


@dataclass(frozen=True)
class Finding:
    """What a rule says about one key of a config."""

    rule: str
    severity: Severity
    key: str
    message: str
    fix: str


@dataclass(frozen=True)
class Rule:
    name: str
    severity: Severity
    check: Callable[[RunConfig], Iterator[Problem]]


RULES: dict[str, Rule] = {}
"""Every rule by name, in the order they run."""


def rule(name: str, severity: Severity = "error") -> Callable[[Callable[[RunConfig], Iterator[Problem]]], None]:
    """Register a function that yields the problems of a run config under a name."""

    def register(check: Callable[[RunConfig], Iterator[Problem]]) -> None:
        assert name not in RULES
        RULES[name] = Rule(name, severity, check)

    return register


def check_run(loaded: LoadedConfig) -> list[Finding]:
    """The findings of all rules over a run config."""
    return [
        Finding(each.name, each.severity, *problem) for each in RULES.values() for problem in each.check(loaded.run)
    ]


def refuse_errors(loaded: LoadedConfig) -> None:
    """Raise one ConfigError that tells every error finding with its value, place and fix."""
    errors = [finding for finding in check_run(loaded) if finding.severity == "error"]
    if errors:
        raise ConfigError(
            "\n".join(str(ConfigError(each.message, where=loaded.where(each.key), hint=each.fix)) for each in errors)
        )


def _at_least(low: int) -> Callable[[Any], bool]:
    return lambda value: value >= low


def _within(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high


def _or_null(allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or allowed(value)


def _positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


NO_CLIPPING = "give a positive norm, or null for no clipping"

BOUNDS: list[tuple[str, Callable[[Any], bool], str, str]] = [
    # key, allowed, what it must be, fix ("" where the first says it all)
    ("model.dropout_rate", lambda value: 0 <= value < 1, "at least 0 and below 1", "T5 fine-tuning uses 0.1"),
    ("data.max_source_tokens", _within(2, MANY), f"from 2 to {MANY}", "one token is the end mark"),
    ("data.max_target_tokens", _within(2, MANY), f"from 2 to {MANY}", "one token is the end mark"),
    ("data.per_device_batch_size", _within(1, MANY), f"from 1 to {MANY}", ""),
    ("data.max_batch_tokens", _or_null(_within(16, 2**30)), "null or from 16 to 2^30", "null cuts batches by examples"),
    ("data.shuffle_buffer", _within(1, 2**24), "from 1 to 2^24", "1 keeps the order of the blocks"),
    ("data.num_workers", _within(0, MOST_WORKERS), f"from 0 to {MOST_WORKERS}", "0 loads in the training process"),
    ("data.seed", lambda value: 0 <= value < SEEDS, "from 0 to 2^32 - 1", ""),
    ("train.max_steps", _or_null(_at_least(1)), "null or at least 1", "null trains for train.epochs"),
    ("train.epochs", _at_least(1), "at least 1", "for less than one pass use train.max_steps"),
    ("train.gradient_accumulation_steps", _at_least(1), "at least 1", "1 means no accumulation"),
    ("train.learning_rate", _positive, "a finite number above 0", "start at 1.0e-4"),
    ("train.warmup_steps", _at_least(0), "at least 0", "0 means no warm-up"),
    ("train.weight_decay", lambda value: value >= 0 and math.isfinite(value), "finite and at least 0", ""),
    ("train.max_grad_norm", _or_null(_positive), "null or a finite number above 0", NO_CLIPPING),
    ("train.keep", _at_least(1), "at least 1", ""),
    ("train.eval_every", _or_null(_at_least(1)), "null or at least 1", "null validates once, at the end"),
    ("train.log_every", _at_least(1), "at least 1", "a large number keeps the log short"),
    ("train.seed", lambda value: 0 <= value < SEEDS, "from 0 to 2^32 - 1", ""),
    ("measure.steps", _at_least(1), "at least 1", ""),
    ("measure.warmup_steps", _at_least(0), "at least 0", ""),
    ("measure.rounds", _at_least(1), "at least 1", "intervals need 3 or more"),
    ("measure.timeout_seconds", _positive, "a finite number above 0", ""),
]


def _bound_rule(key: str, allowed: Callable[[Any], bool], expected: str, fix: str) -> None:
    section, name = key.split(".")

    @rule(f"{key}-range")
    def check(run: RunConfig) -> Iterator[Problem]:
        value = getattr(getattr(run, section), name)
        if not allowed(value):
            yield key, f"{key} is {_shown(value)}, it must be {expected}", fix or f"set a value that is {expected}"


for _bound in BOUNDS:
    _bound_rule(*_bound)


@rule("model-no-tiny-checkpoint")
def _no_tiny_checkpoint(run: RunConfig) -> Iterator[Problem]:
    if run.model.init == "pretrained" and run.model.name == "tiny":
        yield (
            "model.init",
            "model.init is pretrained and model.name tiny, of which there is no published checkpoint",
            "set model.init: scratch, or model.name: small (or a path or hub id)",
        )


@rule("tokenizer-path")
def _tokenizer_path(run: RunConfig) -> Iterator[Problem]:
    kind, path = run.tokenizer.kind, run.tokenizer.path
    if kind == "path" and not path:
        message = f"tokenizer.path is {_shown(path) or 'empty'}, but tokenizer.kind is path"
        yield "tokenizer.path", message, "give a folder or hub id as tokenizer.path"
    elif kind != "path" and path is not None:
        message = f"tokenizer.path is {path} and would be ignored: tokenizer.kind is {kind}"
        yield "tokenizer.path", message, "set tokenizer.kind: path, or remove tokenizer.path"


@rule("tokenizer-vocab-size")
def _vocab_size(run: RunConfig) -> Iterator[Problem]:
    size = run.tokenizer.vocab_size
    if run.tokenizer.kind == "train" and not 300 <= size <= MANY:
        message = f"tokenizer.vocab_size is {size}, it must be from 300 to {MANY}"
        yield "tokenizer.vocab_size", message, "use 300 or more, or tokenizer.kind: bytes"


@rule("data-train-empty")
def _train_files(run: RunConfig) -> Iterator[Problem]:
    if not run.data.train or not all(pattern.strip() for pattern in run.data.train):
        yield "data.train", f"data.train is {_shown(run.data.train)}: no file to train on", "name files, or `stdlib`"


@rule("data-files")
def _missing_files(run: RunConfig) -> Iterator[Problem]:
    validation = run.data.validation if isinstance(run.data.validation, list) else []
    for key, patterns in (("data.train", run.data.train), ("data.validation", validation)):
        for pattern in patterns:
            if not pattern.strip() or pattern == "stdlib" or HUB_NAME.fullmatch(pattern):
                continue  # whether the hub has such a data set is known only when it is loaded
            if not glob.glob(pattern, recursive=True):
                yield key, f"{key} names {pattern}, which does not exist", f"looked from {Path.cwd()}; globs are fine"


@rule("data-stdlib-alone")
def _stdlib_alone(run: RunConfig) -> Iterator[Problem]:
    for key, patterns in (("data.train", run.data.train), ("data.validation", run.data.validation)):
        if isinstance(patterns, list) and "stdlib" in patterns and len(patterns) > 1:
            yield key, f"{key} is {_shown(patterns)}: `stdlib` stands alone", "a file of that name is ./stdlib"


@rule("data-validation")
def _validation(run: RunConfig) -> Iterator[Problem]:
    validation = run.data.validation
    if isinstance(validation, list):
        if not validation or not all(pattern.strip() for pattern in validation):
            message = f"data.validation is {_shown(validation)}: no file to validate on"
            yield "data.validation", message, "name files, a share such as 0.02, or null"
    elif validation is not None and not 0 < validation <= 0.5:
        message = f"data.validation is {validation}, a share of the training rows must be above 0 and at most 0.5"
        yield "data.validation", message, "use a share such as 0.02, or name files"


@rule("data-batch-tokens")
def _batch_tokens(run: RunConfig) -> Iterator[Problem]:
    data = run.data
    if data.max_batch_tokens is None:
        return
    message = f"data.max_batch_tokens is {data.max_batch_tokens}"
    if data.batching != "bucketed":
        yield "data.max_batch_tokens", f"{message}, but data.batching is {data.batching}", "set data.batching: bucketed"
    elif data.streaming:
        yield "data.max_batch_tokens", f"{message}, but a stream knows no lengths ahead", "set it to null"
    elif data.per_device_batch_size != 1:
        message = (
            f"data.per_device_batch_size is {data.per_device_batch_size}, but data.max_batch_tokens cuts the batches"
        )
        yield "data.per_device_batch_size", message, "set data.per_device_batch_size: 1"


@rule("data-packed")
def _packed(run: RunConfig) -> Iterator[Problem]:
    data = run.data
    if data.batching == "packed" and data.streaming:
        message = "data.batching is packed, but a stream knows no lengths ahead"
        yield "data.batching", message, "set data.streaming: false, or data.batching: bucketed"
    if data.pack_tokens is None:
        return
    if data.batching != "packed":
        message = f"data.pack_tokens is {data.pack_tokens}, but data.batching is {data.batching}"
        yield "data.pack_tokens", message, "set data.batching: packed"
    elif not data.max_source_tokens <= data.pack_tokens <= MANY:
        message = f"data.pack_tokens is {data.pack_tokens}, it must hold max_source_tokens, {data.max_source_tokens}"
        yield "data.pack_tokens", message, f"set at least {data.max_source_tokens}, at most {MANY}"


@rule("data-delimiter")
def _delimiter(run: RunConfig) -> Iterator[Problem]:
    delimiter = run.data.delimiter
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        yield "data.delimiter", f"data.delimiter is {delimiter!r}, it must be one character", 'such as ";"'


@rule("data-template")
def _templates(run: RunConfig) -> Iterator[Problem]:
    for key, template in (("data.source", run.data.source), ("data.target", run.data.target)):
        if problem := _template_problem(template):
            fix = 'write columns as {column} and a literal brace twice: "summarize: {article}"'
            yield key, f"{key} is {template!r}: {problem}", fix


@rule("train-eval-without-data")
def _eval_without_data(run: RunConfig) -> Iterator[Problem]:
    if run.train.eval_every is not None and run.data.validation is None:
        message = f"train.eval_every is {run.train.eval_every}, but there is no data.validation"
        yield "train.eval_every", message, "set data.validation to a share such as 0.02 or to files"


@rule("train-checkpoints-unavailable")
def _checkpoints(run: RunConfig) -> Iterator[Problem]:
    every, resume = run.train.save_every, run.train.resume
    if every is not None:
        message = f"train.save_every is {every}, but checkpoints during training are not available yet"
        yield "train.save_every", message, "remove it; the final model is saved in model/"
    if resume not in ("auto", "never"):
        message = f"train.resume is {resume}, but checkpoints during training are not available yet"
        yield "train.resume", message, "use auto or never; model.name takes the folder of a saved model"


def _template_problem(template: str) -> str | None:
    """Why a template cannot be filled from the columns of a row, or None."""
    try:
        fields = [field for field in string.Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        return f"{error}"
    for _, name, spec, conversion in fields:
        assert name is not None
        if not name.strip() or name.isdecimal():
            return "a column needs a name"
        if set(name) & set(".[]{"):
            return f"{{{name}}} reaches into a column, only its text can be used"
        if spec or conversion:
            return f"{{{name}}} has a format, only the column as it is can be used"
    return None if fields else "it names no column, so every row would give the same text"


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value}"
