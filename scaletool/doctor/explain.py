"""`scaletool doctor --explain`: every effective setting, where its value comes from, and which sources lost.

The order of the sources is that of the installed versions, as measured: a test launches runs with sources that
contradict each other, and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletool import __version__
from scaletool.config import RunConfig
from scaletool.doctor.documents import Document, read
from scaletool.doctor.rules import arguments
from scaletool.doctor.schemas import schemas

PRECISION, ACCUMULATION = "ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
NO_FILE = "no source"


@dataclass(frozen=True)
class Source:
    """A value that a setting could have, and where it stands."""

    value: Any
    place: str

    def __str__(self) -> str:
        return f"{shown(self.value)} ({self.place})"


@dataclass(frozen=True)
class Setting:
    """sources: by precedence; the first wins. None where nobody says anything."""

    name: str
    sources: tuple[Source, ...]

    @property
    def value(self) -> Any:
        return self.sources[0].value if self.sources else None

    @property
    def place(self) -> str:
        return self.sources[0].place if self.sources else NO_FILE

    @property
    def lost(self) -> tuple[Source, ...]:
        """What other sources say that is not a default, where it differs."""
        return tuple(
            source for source in self.sources[1:] if source.value != self.value and "default" not in source.place
        )

    def to_dict(self) -> dict[str, Any]:
        lost = [{"value": source.value, "source": source.place} for source in self.lost]
        return {"setting": self.name, "value": self.value, "source": self.place, "lost": lost}


def explain(documents: Sequence[Document], environment: Mapping[str, str]) -> list[Setting]:
    """The settings of the run that these files make together.

    With training arguments among them it is a Trainer of the user's own, else a run of `scaletool.train`.
    """
    files = _Files(documents, environment)
    return _trainer(files) if files.arguments and not files.run else _ours(files)


def shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class _Files:
    """The documents by kind, and how to look a value up in each."""

    def __init__(self, documents: Sequence[Document], environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.run = _first(documents, "run")
        self.arguments = _first(documents, "arguments")
        self.accelerate = _first(documents, "accelerate")
        self.deepspeed = _first(documents, "deepspeed") or self._named_deepspeed()

    def _named_deepspeed(self) -> Document | None:
        """The JSON that the accelerate config names."""
        named = self.accelerate and self.accelerate.get("deepspeed_config.deepspeed_config_file")
        if not self.accelerate or not isinstance(named, str):
            return None
        folder = Path(self.accelerate.path).parent
        for path in (Path(named), folder / named, folder.parent / named):
            if path.is_file():
                found = read(str(path))
                return found if found.kind == "deepspeed" else None
        return None

    def launcher(self, key: str) -> list[Source]:
        """From the accelerate config."""
        return _in(self.accelerate, key)

    @property
    def uses_deepspeed(self) -> bool:
        if self.accelerate is None:
            return self.deepspeed is not None
        return bool(self.accelerate.get("distributed_type") == "DEEPSPEED")

    def exported_accumulation(self) -> list[Source]:
        """The launcher exports the accelerate config's, and accelerate lets the variable win over the script."""
        inline = self.launcher("deepspeed_config.gradient_accumulation_steps") if self.uses_deepspeed else []
        return [*inline, *self.variable(ACCUMULATION)]

    def json_precision(self) -> list[Source]:
        enabled = [self.json(f"{name}.enabled") for name in ("fp16", "bf16")]
        return [
            Source(name, source.place)
            for name, sources in zip(("fp16", "bf16"), enabled, strict=True)
            for source in sources
            if source.value is True
        ]

    def flagged_precision(self) -> list[Source]:
        """fp16: true or bf16: true of the training arguments."""
        found = [(name, self.argument(name)[0]) for name in ("bf16", "fp16")]
        return [Source(name, source.place) for name, source in found if source.value is True]

    def json(self, key: str) -> list[Source]:
        """From the DeepSpeed file, which counts only under DEEPSPEED; "auto" is no value."""
        if not self.uses_deepspeed:
            return []
        return [source for source in _in(self.deepspeed, key) if source.value != "auto"]

    def variable(self, name: str) -> list[Source]:
        value = self.environment.get(name)
        number = int(value) if value and value.isdecimal() else value
        return [] if number is None else [Source(number, f"environment ({name})")]

    def config(self, key: str) -> list[Source]:
        """From the run config, or its default."""
        section, name = key.split(".")
        default = getattr(getattr(RunConfig(), section), name)
        return [*_in(self.run, key), Source(default, f"default of scaletool {__version__}")]

    def argument(self, name: str) -> list[Source]:
        """From the training arguments, or their default."""
        found = arguments.given(self.arguments, name) if self.arguments else None
        place = f"default of transformers {schemas().versions['transformers']}"
        default = [Source(schemas().training_arguments.get(name), place)]
        if found is None or self.arguments is None:
            return default
        return [Source(found.value, _place(self.arguments, found.key)), *default]


def _ours(files: _Files) -> list[Setting]:
    """A run of scaletool.train: the run config owns its values, but accelerate lets some variables win over it. Such a
    run is refused when it starts; what is shown is what it would have been."""
    mode = Setting("mode", tuple(files.config("train.mode")))
    return [
        mode,
        *_launch(files),
        _setting("precision", _our_precision(files)),
        _setting("per_device_batch_size", files.config("data.per_device_batch_size"), files.json(MICRO_BATCH)),
        _setting("gradient_accumulation_steps", _accumulation(files, mode.value)),
        _setting("max_grad_norm", files.config("train.max_grad_norm"), files.json("gradient_clipping")),
        *_sharding(files),
        *(_setting(key.split(".")[1], files.config(key)) for key in OUR_OTHERS),
    ]


def _accumulation(files: _Files, mode: str) -> list[Source]:
    """accelerate lets its variable win over a loop; Trainer counts by itself, and DeepSpeed's file is filled in."""
    own, exported = files.config("train.gradient_accumulation_steps"), files.exported_accumulation()
    if mode == "trainer" or files.uses_deepspeed:
        return [*own, *exported, *files.json("gradient_accumulation_steps")]
    return [*exported, *own]


MICRO_BATCH = "train_micro_batch_size_per_gpu"
OUR_OTHERS = (
    "train.schedule",
    "train.learning_rate",
    "train.warmup_steps",
    "data.batching",
    "data.streaming",
    "data.num_workers",
)


def _our_precision(files: _Files) -> list[Source]:
    exported = [*files.launcher("mixed_precision"), *files.variable(PRECISION)]
    own = files.config("train.precision")
    # The DeepSpeed file is rewritten to say what the run config says; elsewhere accelerate's own sources win.
    chosen = [*own, *files.json_precision(), *exported] if files.uses_deepspeed else [*exported, *own]
    return [Source(NAMES_OF_PRECISION.get(source.value, source.value), source.place) for source in chosen]


NAMES_OF_PRECISION = {"no": "fp32", False: "fp32"}


def _trainer(files: _Files) -> list[Setting]:
    """A Trainer of the user's own."""
    return [
        Setting("mode", (Source("trainer", files.arguments.path if files.arguments else NO_FILE),)),
        *_launch(files),
        _setting(
            "precision",
            files.flagged_precision(),
            files.launcher("mixed_precision"),
            files.variable(PRECISION),
            files.json_precision(),
            [Source("fp32", f"default of transformers {schemas().versions['transformers']}")],
        ),
        _setting("per_device_batch_size", files.json(MICRO_BATCH), files.argument("per_device_train_batch_size")),
        _setting(
            "gradient_accumulation_steps",
            files.json("gradient_accumulation_steps"),
            files.argument("gradient_accumulation_steps"),
            files.exported_accumulation(),
        ),
        _setting("max_grad_norm", files.json("gradient_clipping"), files.argument("max_grad_norm")),
        *_sharding(files),
        _setting("max_steps", files.argument("max_steps")),
        _setting("num_train_epochs", files.argument("num_train_epochs")),
        _setting("schedule", files.json("scheduler.type"), files.argument("lr_scheduler_type")),
        _setting("learning_rate", files.json("optimizer.params.lr"), files.argument("learning_rate")),
        _setting("warmup_steps", files.json("scheduler.params.warmup_num_steps"), files.argument("warmup_steps")),
        _setting("unused-parameter search", files.argument("ddp_find_unused_parameters"), [UNUSED_SEARCH]),
        _setting("loader of a stream", files.argument("accelerator_config"), [DISPATCHER]),
    ]


UNUSED_SEARCH = Source(True, "default of Trainer for models without gradient checkpointing")
DISPATCHER = Source("rank 0 reads for all", "default of accelerate for iterable data")


def _launch(files: _Files) -> list[Setting]:
    return [
        _setting("world_size", files.launcher("num_processes"), files.variable("WORLD_SIZE")),
        _setting("num_machines", files.launcher("num_machines")),
        _setting("distributed_type", files.launcher("distributed_type")),
        _setting("gpu_ids", files.variable("CUDA_VISIBLE_DEVICES"), files.launcher("gpu_ids")),
    ]


def _sharding(files: _Files) -> list[Setting]:
    if files.uses_deepspeed:
        inline = "deepspeed_config."
        return [
            _setting("zero_stage", files.json("zero_optimization.stage"), files.launcher(inline + "zero_stage")),
            _setting(
                "offload_optimizer",
                files.json("zero_optimization.offload_optimizer.device"),
                files.launcher(inline + "offload_optimizer_device"),
            ),
        ]
    if files.launcher("fsdp_config"):
        keys = ("fsdp_version", "fsdp_reshard_after_forward", "fsdp_sharding_strategy", "fsdp_offload_params")
        names = (*keys, "fsdp_transformer_layer_cls_to_wrap")
        return [_setting(name, files.launcher(f"fsdp_config.{name}")) for name in names]
    return []


def _setting(name: str, *sources: Iterable[Source]) -> Setting:
    return Setting(
        name, tuple(source for each in sources for source in each if source.value is not None or name in NULLABLE)
    )


NULLABLE = ("max_grad_norm",)
"""Settings of which null is a value."""


def _first(documents: Sequence[Document], kind: str) -> Document | None:
    return next((document for document in documents if document.kind == kind), None)


def _in(document: Document | None, key: str) -> list[Source]:
    if document is None or not document.has(key):
        return []
    return [Source(document.get(key), _place(document, key))]


def _place(document: Document, key: str) -> str:
    line = document.line(key)
    return f"{document.path}:{line}" if line else document.path
