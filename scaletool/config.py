"""The run config: frozen dataclasses, a strict loader, and the origin of every value.

A value comes from a default, a YAML file or `--set section.key=value`; unknown keys and wrong
types are refused with file, line, key, value and remedy before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from scaletool.errors import ConfigError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*(/[\w-]+)?(:\w+)?")
"""How data.train names a data set of the hub: `owner/name` or `name`, with a split (train without one) as `:split`."""


@dataclass(frozen=True)
class ModelConfig:
    name: str = "tiny"
    """tiny, small, base, large, 3b, v1_1-small, v1_1-base, v1_1-large, v1_1-xl, or a local path or hub id."""
    init: Literal["scratch", "pretrained"] = "scratch"
    """scratch: fresh weights from train.seed, no download. pretrained: the checkpoint's weights, always in float32."""
    dropout_rate: float = 0.0
    """Share of activations dropped. 0 keeps losses comparable over modes and GPU counts; T5 fine-tuning uses 0.1."""
    fp16_guard: Literal["auto", "none"] = "auto"
    """Protection against fp16 overflow beyond the libraries' own. None is built in yet, so both values mean that."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of blocks and compute the rest again in backward: less memory, slower."""


@dataclass(frozen=True)
class TokenizerConfig:
    kind: Literal["bytes", "train", "path"] = "bytes"
    """bytes: UTF-8 bytes with ByT5's numbers. train: Unigram of the training data, cached. path: a saved tokenizer."""
    vocab_size: int = 4096
    """Number of pieces when kind is `train`."""
    path: str | None = None
    """Local folder or hub id when kind is `path`."""


@dataclass(frozen=True)
class DataConfig:
    train: list[str] = field(default_factory=lambda: ["stdlib"])
    """Files or globs (jsonl, csv, tsv, parquet, also .gz and .zst), folders saved by datasets, data sets of the hub
    (owner/name or owner/name:split), or `stdlib`: the embedded pairs."""
    validation: list[str] | float | None = None
    """Files as for train, or the share of training rows to hold out (0 to 0.5). Null: no validation."""
    source: str = "{source}"
    """Template of the encoder text; {column} is replaced by the column of the row."""
    target: str = "{target}"
    """Template of the decoder text."""
    max_source_tokens: int = 256
    """Encoder tokens per example, end mark included; longer texts are cut."""
    max_target_tokens: int = 64
    """Decoder tokens per example, end mark included; longer texts are cut."""
    per_device_batch_size: int = 8
    """Examples per GPU per forward; packed: packed rows; with max_batch_tokens: batches, so 1."""
    batching: Literal["padded", "bucketed", "packed"] = "bucketed"
    """padded: random order. bucketed: global batches of like length. Both pad to the longest, in eights.
    packed: several examples behind each other in one row, each seeing only itself."""
    max_batch_tokens: int | None = None
    """bucketed only: cut batches by padded source + target slots per GPU per forward. Null: cut by examples."""
    pack_tokens: int | None = None
    """packed only: source slots of a packed row, from max_source_tokens up. Null: max_source_tokens."""
    streaming: bool = False
    """Read and tokenise rows when they are needed, and keep nothing on disk but where they begin."""
    shuffle_buffer: int = 16384
    """streaming only: rows that are shuffled together; they come from blocks all over the data."""
    delimiter: str | None = None
    """Column delimiter of CSV and TSV files. Null: a comma and a tab."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What an unreadable or incomplete row does: stop at the first, or be counted, reported and left out."""
    num_workers: int = 0
    """Loader processes per GPU; 0 collates in the training process."""
    cache_dir: str | None = None
    """Folder of tokenised data and trained tokenizers. Null: scaletool in the user's cache folder."""
    seed: int = 0
    """Seed of the sample order; with the epoch it alone decides the order."""


@dataclass(frozen=True)
class TrainConfig:
    mode: Literal["custom", "trainer"] = "custom"
    """custom: the accelerate loop. trainer: transformers' Trainer on the same loader."""
    max_steps: int | None = None
    """Optimizer steps of the whole run; wins over epochs."""
    epochs: int = 1
    """Passes over the training data."""
    gradient_accumulation_steps: int = 1
    """Micro-steps per optimizer step."""
    learning_rate: float = 1.0e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine would reach 0 one step after the last."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up; the first runs at 1/warmup_steps of the peak."""
    weight_decay: float = 0.01
    """AdamW decay, applied to matrices only (not to layer-norm scales)."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient of the global batch to this 2-norm. Null: no clipping, on every engine."""
    precision: Literal["fp16", "fp32", "bf16"] = "fp16"
    """fp16 runs as fp32 on a machine without GPUs, and the result says so."""
    output_dir: str | None = None
    """Folder of record.json and model/. Null: runs/<UTC time>-train."""
    save_every: int | None = None
    """Optimizer steps between checkpoints. Only null is available."""
    keep: int = 2
    """Number of checkpoints to keep."""
    resume: str = "auto"
    """auto | never | path of a checkpoint."""
    eval_every: int | None = None
    """Optimizer steps between validation passes. Null with validation data: once, at the end."""
    log_every: int = 10
    """Optimizer steps between log lines, which wait for the device; fp16 waits every step, for its overflow check."""
    seed: int = 0
    """Seed of weights and dropout."""


@dataclass(frozen=True)
class MeasureConfig:
    steps: int = 30
    """Measured optimizer steps per cell and round."""
    warmup_steps: int = 5
    """Optimizer steps run before the measured ones and left out of every figure."""
    rounds: int = 3
    """Passes over all cells; the unit of replication of every interval."""
    timeout_seconds: float = 1200.0
    """A launch that takes longer is stopped, all its processes with it, and recorded as `timeout`."""
    record_samples: bool = False
    """Write samples.rank<k>.jsonl: the source rows of every micro-step."""


@dataclass(frozen=True)
class LaunchConfig:
    """What the driver asked for; written by `scaletool train` and `scaletool sweep`, checked by the entrypoint."""

    profile: str | None = None
    """Name of the profile the launch line uses."""
    engine: str | None = None
    """Engine the profile stands for (profiles.ENGINES)."""
    world_size: int | None = None
    """Number of worker processes over all nodes."""
    scaling: Literal["weak", "strong"] | None = None
    """What the sweep held fixed: the per-device batch (weak) or the global batch (strong)."""
    measured: bool = False
    """True in a sweep: no model is saved, and warm-up steps are kept apart."""
    environment: dict[str, str] = field(default_factory=dict)
    """ACCELERATE_* variables that were set around the driver, to be held against this config."""


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dict, as written to run.json."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with dotted keys replaced, given with `__` for the dot: replace(train__mode="trainer")."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            section, key = name.split("__", 1)
            sections.setdefault(section, {})[key] = value
        return dataclasses.replace(
            self, **{name: dataclasses.replace(getattr(self, name), **keys) for name, keys in sections.items()}
        )


@dataclass(frozen=True)
class LoadedConfig:
    """A run config and, for every key that was given, where it came from ("run.yaml:12", "--set ...")."""

    run: RunConfig
    origins: Mapping[str, str]

    def where(self, key: str) -> str:
        return f"{self.origins.get(key, 'default')} ({key})"


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read RUN.yaml (or run.json) and apply `--set section.key=value` in order.

    Raises ConfigError for a missing or malformed file, an unknown key or a value of the wrong type.
    """
    given: dict[str, tuple[Any, str]] = {}
    if path is not None:
        for key, value, line in _read_yaml(Path(path)):
            given[key] = (value, f"{path}:{line}")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"`--set {override}` has no value", hint="write --set section.key=value")
        key = key.strip()
        takes_text = str in _choices(known_keys().get(key))
        given[key] = (text if takes_text and text not in NULLS else parse_scalar(text), f"--set {override}")
    return LoadedConfig(_build(given), {key: where for key, (_, where) in given.items()})


def known_keys() -> dict[str, Any]:
    """Every settable key, dotted, with its annotation."""
    keys: dict[str, Any] = {}
    for section, section_type in typing.get_type_hints(RunConfig).items():
        for name, annotation in typing.get_type_hints(section_type).items():
            keys[f"{section}.{name}"] = annotation
    return keys


NULLS = ("null", "~", "")
"""How YAML writes nothing; any other text given by --set for a key that takes a text is that text."""

LARGEST_INTEGER = 2**32
"""Beyond every sensible count, and within what numpy and torch can hold."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as a string; here it is the number it looks like."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_scalar(text: str) -> Any:
    """The value of a `--set` text, read as YAML (so lists and null work)."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return text


def _read_yaml(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Yield (dotted key, value, line) of every leaf two levels deep."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"run config {path} does not exist", hint="give the path of a YAML file, or none") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run config {path} cannot be read: {error}") from None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"not valid YAML: {getattr(error, 'problem', error)}", where=where) from None
    if root is None:
        return
    for section, section_node in _mapping(root, path, "the run config"):
        for key, node in _mapping(section_node, path, section):
            line = node.start_mark.line + 1
            try:
                yield f"{section}.{key}", loader.construct_object(node, deep=True), line
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                problem = getattr(error, "problem", error)
                raise ConfigError(
                    f"the value of {section}.{key} is not understood: {problem}", where=f"{path}:{line}"
                ) from None


def _mapping(node: yaml.Node, path: Path, name: str) -> Iterator[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.ScalarNode) and node.value in NULLS:
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{name} must be a mapping of keys to values",
            where=f"{path}:{node.start_mark.line + 1}",
            hint="sections are " + ", ".join(RunConfig.__dataclass_fields__),
        )
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(
                f"key {key} of {name} is given twice, in lines {seen[key]} and {line}", where=f"{path}:{line}"
            )
        seen[key] = line
        yield key, value_node


def _build(given: Mapping[str, tuple[Any, str]]) -> RunConfig:
    keys = known_keys()
    sections: dict[str, dict[str, Any]] = {name: {} for name in RunConfig.__dataclass_fields__}
    for key, (value, where) in given.items():
        if key not in keys:
            raise ConfigError(f"unknown key {key} (value {value!r})", where=where, hint=_suggestion(key, keys))
        section, name = key.split(".")
        sections[section][name] = _coerce(value, keys[key], key, where)
    types_of = typing.get_type_hints(RunConfig)
    return RunConfig(**{name: types_of[name](**values) for name, values in sections.items()})


def _suggestion(key: str, keys: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    same_name = [known for known in keys if known.split(".")[1] == key.split(".")[-1]]
    if close or same_name:
        return f"did you mean {(same_name or close)[0]}?"
    section = key.split(".")[0]
    known = [name for name in keys if name.startswith(f"{section}.")] or sorted({name.split(".")[0] for name in keys})
    return "known: " + ", ".join(known)


def _coerce(value: Any, annotation: Any, key: str, where: str) -> Any:
    """`value` as the annotated type, or ConfigError. An int is accepted as a float, one text as a list of one."""
    for choice in _choices(annotation):
        if typing.get_origin(choice) is Literal:
            if any(
                value is option or (value == option and type(value) is type(option))
                for option in typing.get_args(choice)
            ):
                return value
        elif choice is type(None):
            if value is None:
                return None
        elif typing.get_origin(choice) is dict:
            if isinstance(value, dict):
                return value
        elif typing.get_origin(choice) is list:
            if isinstance(value, str):
                return [value]
            if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
                return value
        elif choice is int and type(value) is int and abs(value) > LARGEST_INTEGER:
            raise ConfigError(f"{key} is {value}, beyond any sensible count", where=f"{where} ({key})")
        elif choice is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, choice) and not (isinstance(value, bool) and choice is not bool):
            return value
    hint = 'quote a text that begins with a brace: "{column}"' if isinstance(value, dict) else None
    raise ConfigError(f"{key} is {value!r}, expected {_describe(annotation)}", where=f"{where} ({key})", hint=hint)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Members of a union; `Literal[...] | None` is a typing.Union, `int | None` a types.UnionType."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _describe(annotation: Any) -> str:
    if len(_choices(annotation)) > 1:
        return " or ".join(_describe(choice) for choice in _choices(annotation))
    if typing.get_origin(annotation) is Literal:
        return " or ".join(json.dumps(option) for option in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return "a text or a list of texts"
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(annotation, str(annotation))
