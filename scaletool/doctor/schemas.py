"""The keys that the installed libraries know, read from their sources as syntax: nothing of them is imported.

Where a library is not installed (a login node), or its sources have another form, the keys in schemas.json stand in:
those of the versions that scaletool is tested with. `python -m scaletool.doctor.schemas` writes that file.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_name("schemas.json")
OTHER_DEEPSPEED_KEYS = {
    "aio", "amp", "bf16", "bfloat16", "comet", "communication_data_type", "compression_training", "csv_monitor",
    "disable_allgather", "eigenvalue", "elasticity", "fp16", "graph_harvesting", "monitor_config", "nebula",
    "progressive_layer_drop", "sparse_attention", "sparse_gradients", "tensorboard", "timers", "wandb",
}  # fmt: skip
"""Those that its sources look up in roundabout ways."""
LIBRARIES = ("accelerate", "deepspeed", "transformers")


@dataclass(frozen=True)
class Schemas:
    """Names by where they may stand. versions: of the libraries they were read from, with "(kept)" where they were
    not installed.

    accelerate: top-level keys of a config; accelerate_nested: keys of its fsdp_config and deepspeed_config, as
    written in the file. deepspeed: top-level keys of a JSON; zero, offload, fp16, bf16: keys of its blocks.
    training_arguments: fields of Seq2SeqTrainingArguments with their defaults where they are plain values; trainer:
    parameters of Trainer.
    """

    versions: dict[str, str]
    accelerate: list[str]
    accelerate_nested: list[str]
    deepspeed: list[str]
    zero: list[str]
    offload: list[str]
    fp16: list[str]
    bf16: list[str]
    training_arguments: dict[str, Any]
    trainer: list[str]


@cache
def schemas() -> Schemas:
    """Of the installed libraries, or those kept."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    versions = dict(kept.pop("versions"))
    for library, read in _READERS.items():
        try:
            installed = version(library)
            if installed != versions[library]:  # else reading would give what is kept
                kept |= read(_folder(library))
            versions[library] = installed
        except (PackageNotFoundError, OSError, SyntaxError, KeyError, LookupError):
            versions[library] = f"{versions[library]} (kept)"
    return Schemas(versions=versions, **kept)


def read_installed() -> dict[str, Any]:
    """Everything, from the installed libraries. Raises where one is missing."""
    found: dict[str, Any] = {"versions": {name: version(name) for name in LIBRARIES}}
    for library, read in _READERS.items():
        found |= read(_folder(library))
    return found


def _accelerate(folder: Path) -> dict[str, Any]:
    config = _tree(folder / "commands/config/config_args.py")
    options = {
        str(call.args[0].value).removeprefix("--")
        for call in ast.walk(_tree(folder / "commands/launch.py"))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "add_argument"
        and isinstance(call.args[0], ast.Constant)
    }
    prefixes = ("fsdp_", "zero", "offload_", "gradient_", "deepspeed_")
    return {
        "accelerate": sorted({*_fields(config, "BaseConfig"), *_fields(config, "ClusterConfig")}),
        "accelerate_nested": sorted(name for name in options if name.startswith(prefixes)),
    }


def _deepspeed(folder: Path) -> dict[str, Any]:
    values: dict[str, str] = {}  # of all constants
    used: set[str] = set()
    for path in (*folder.rglob("constants.py"), *folder.rglob("config.py"), folder / "runtime/config_utils.py"):
        for node in ast.walk(_tree(path)):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
                and isinstance(node.targets[0], ast.Name)
            ):
                values[node.targets[0].id] = node.value.value
            used |= set(_looked_up(node))
    names = {values.get(name, name) for name in used}
    precision, zero = _tree(folder / "runtime/precision_config.py"), _tree(folder / "runtime/zero/config.py")
    offload = _tree(folder / "runtime/zero/offload_config.py")
    return {
        "deepspeed": sorted({name for name in names if name.islower()} | OTHER_DEEPSPEED_KEYS),
        "zero": sorted(_fields(zero, "DeepSpeedZeroConfig")),
        "offload": sorted(
            {
                *_fields(offload, "DeepSpeedZeroOffloadParamConfig"),
                *_fields(offload, "DeepSpeedZeroOffloadOptimizerConfig"),
            }
        ),
        "fp16": sorted(_fields(precision, "DeepSpeedFP16Config")),
        "bf16": sorted(_fields(precision, "DeepSpeedBF16Config")),
    }


def _looked_up(node: ast.AST) -> Iterator[str]:
    """The key, or its constant's name, where an expression looks for one in the whole dict of a config."""
    key: ast.expr | None = None
    if isinstance(node, ast.Call):
        in_helper = len(node.args) > 1 and _is_whole_config(node.args[0])
        in_get = isinstance(node.func, ast.Attribute) and node.func.attr == "get" and _is_whole_config(node.func.value)
        key = node.args[1] if in_helper else node.args[0] if in_get and node.args else None
    elif isinstance(node, ast.Compare) and _is_whole_config(node.comparators[0]):
        key = node.left
    elif isinstance(node, ast.Subscript) and _is_whole_config(node.value):
        key = node.slice
    if isinstance(key, ast.Name):
        yield key.id
    elif isinstance(key, ast.Constant) and isinstance(key.value, str):
        yield key.value


def _is_whole_config(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys":
        node = node.func.value
    names = {"param_dict", "monitor_dict", "pd", "ds_config", "config_dict", "_param_dict"}
    return (isinstance(node, ast.Name) and node.id in names) or (isinstance(node, ast.Attribute) and node.attr in names)


def _transformers(folder: Path) -> dict[str, Any]:
    arguments = _fields(_tree(folder / "training_args.py"), "TrainingArguments")
    arguments |= _fields(_tree(folder / "training_args_seq2seq.py"), "Seq2SeqTrainingArguments")
    init = next(
        node
        for node in _class(_tree(folder / "trainer.py"), "Trainer").body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    parameters = [argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)]
    return {"training_arguments": dict(sorted(arguments.items())), "trainer": parameters[1:]}


_READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "transformers": _transformers,
}


def _folder(library: str) -> Path:
    spec = importlib.util.find_spec(library)  # finds, does not import
    if spec is None or spec.origin is None:
        raise PackageNotFoundError(library)
    return Path(spec.origin).parent


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _fields(tree: ast.Module, name: str) -> dict[str, Any]:
    """Annotated fields of a class, its aliases too, with their default where that is a plain value, else None."""
    found: dict[str, Any] = {}
    for node in _class(tree, name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            for key in (node.target.id, *_alias(node.value)):
                found[key] = _default(node.value)
    return found


def _alias(value: ast.expr | None) -> Iterator[str]:
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        if keyword.arg == "alias":
            yield ast.literal_eval(keyword.value)


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    return value.value if isinstance(value, ast.Constant) else None


if __name__ == "__main__":
    KEPT.write_text(json.dumps(read_installed(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
