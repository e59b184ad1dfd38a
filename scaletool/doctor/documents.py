"""A user's file, read safely and recognised by its content. Nothing in it is executed, whatever it says."""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
import stat
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from scaletool.doctor.schemas import schemas

Kind = Literal["accelerate", "deepspeed", "run", "arguments", "model", "script", "sbatch", "environment", "unknown"]
"""accelerate: a config of `accelerate launch`. deepspeed: a DeepSpeed JSON. run: a run config of ours. arguments:
training arguments, or a dict around them. model: a T5 config. script: Python. sbatch: a job script. environment: what
a probe of this machine found."""

MOST_BYTES = 1 << 20
MOST_VALUES, DEEPEST = 20_000, 50
"""Far beyond any config; aliases count each time they are used, so a bomb ends here."""

RUN_SECTIONS = {"model", "tokenizer", "data", "train", "measure", "launch", "slurm"}
ENVIRONMENT_KEY = "scaletool_environment"

PathParts = tuple[str, ...]


class Fault(NamedTuple):
    """Why a file could not be read as what it is: at which line, what, and the fix."""

    rule: str
    at: int | None
    message: str
    fix: str


@dataclass
class Document:
    """One file. path: as the user wrote it. data: the values of a config, {} for others. lines: of every key, by its
    parts. tree: the syntax of a script. faults: what kept it from being read."""

    path: str
    kind: Kind
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    lines: Mapping[PathParts, int] = field(default_factory=dict)
    tree: ast.Module | None = None
    faults: list[Fault] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key ("fsdp_config.fsdp_version"); default where it or a part of it is not there."""
        value: Any = self.data
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def has(self, key: str) -> bool:
        return self.get(key, self) is not self

    def line(self, key: str) -> int | None:
        """The line of a dotted key, or of the nearest part of it that stands in the file."""
        parts = tuple(key.split("."))
        return next((self.lines[parts[:end]] for end in range(len(parts), 0, -1) if parts[:end] in self.lines), None)


def read(path: str) -> Document:
    """Read and recognise a file. What is wrong with it as a file stands in `faults`; nothing is raised."""
    try:
        info = Path(path).stat()
        if not stat.S_ISREG(info.st_mode):
            return _unreadable(path, "it is not a regular file", "give a file")
        if info.st_size > MOST_BYTES:
            size = f"it has {info.st_size:,} bytes, more than any config or script"
            return _unreadable(path, size, "data files are looked at by `scaletool data inspect`")
        content = Path(path).read_bytes()
    except OSError as error:
        return _unreadable(path, error.strerror or str(error), "look at the path and its rights")
    except ValueError as error:  # a null byte in the path
        return _unreadable(path, str(error), "look at the path")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        document = _unreadable(path, f"byte {content[error.start]:#04x} is not UTF-8", "save the file as UTF-8")
        document.faults[0] = document.faults[0]._replace(at=line)
        return document
    if "\0" in text:
        return _unreadable(path, "it has null bytes: not a text", "give a config or a script")
    return parse(path, text)


def parse(path: str, text: str) -> Document:
    """Recognise a text and read it as what it is."""
    try:
        if re.search(r"^#\s*sbatch\b", text, re.IGNORECASE | re.MULTILINE) or re.match(r"#!.*\b(ba|z|da|k)?sh\b", text):
            return Document(path, "sbatch", text)
        if text.lstrip()[:1] in ("{", "["):
            return _config(path, text, *_read_json(text))
        if path.endswith(".py") or _looks_like_python(text):
            return _script(path, text)
        return _config(path, text, *_read_yaml(text))
    except _NotReadable as problem:
        kind: Kind = "script" if path.endswith(".py") else "unknown"
        return Document(path, kind, text, faults=[problem.fault])
    except (RecursionError, MemoryError):
        return _unreadable(path, "it is nested too deeply to be read", "give a config or a script")


class _NotReadable(Exception):
    def __init__(self, rule: str, line: int | None, message: str, fix: str) -> None:
        super().__init__(message)
        self.fault = Fault(rule, line, message, fix)


def _unreadable(path: str, message: str, fix: str) -> Document:
    return Document(path, "unknown", faults=[Fault("file-unreadable", None, f"cannot be read: {message}", fix)])


def _looks_like_python(text: str) -> bool:
    return bool(re.search(r"^(import |from \w[\w.]* import |def \w+\(|class \w+|@\w+)", text, re.MULTILINE))


def _script(path: str, text: str) -> Document:
    # Magic lines of notebooks are not Python; they stay as empty lines.
    lines = [re.sub(r"^(\s*)[%!].*", r"\1pass" if line[:1].isspace() else "", line) for line in text.split("\n")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise _NotReadable("script-syntax", line, f"not valid Python: {error.args[0]}", "mend the line") from None
    return Document(path, "script", text, tree=tree)


def _config(path: str, text: str, data: Any, lines: dict[PathParts, int]) -> Document:
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise _NotReadable("file-unknown", None, f"it is {kind}, not a mapping of keys to values", "give a config")
    kind = recognise(data)
    faults = []
    if kind == "unknown":
        shown = ", ".join(list(map(str, data))[:5]) or "none"
        known = "accelerate and DeepSpeed configs, training arguments, run configs, T5 configs, Python and job scripts"
        faults = [
            Fault("file-unknown", None, f"not a kind of file that is known; its keys: {shown}", f"known: {known}")
        ]
    return Document(path, kind, text, data, lines, faults=faults)


def recognise(data: Mapping[str, Any]) -> Kind:
    """The kind whose keys stand in it most; misspelt keys count half."""
    if ENVIRONMENT_KEY in data:
        return "environment"
    if data and set(data) <= RUN_SECTIONS and all(value is None or isinstance(value, dict) for value in data.values()):
        return "run"
    keys = _keys(data)
    known: dict[Kind, set[str]] = {
        "accelerate": set(schemas().accelerate),
        "deepspeed": set(schemas().deepspeed) - {"optimizer", "scheduler", "fp16", "bf16"},
        "arguments": set(schemas().training_arguments) | FACTS,
        "model": MODEL_KEYS,
    }
    if isinstance(data.get("fp16"), dict) or isinstance(data.get("bf16"), dict):
        keys.add("zero_optimization")
    scores = {kind: float(len(keys & names)) for kind, names in known.items()}
    if not any(scores.values()):
        for kind, names in known.items():
            scores[kind] = 0.5 * sum(bool(difflib.get_close_matches(key, names, 1, 0.85)) for key in list(keys)[:50])
    kind = max(scores, key=lambda name: scores[name])
    return kind if scores[kind] else "unknown"


FACTS = {
    "num_epochs", "batches_per_epoch", "batches_per_process", "world_size", "hf_training_arguments", "padding",
    "max_length", "typical_source_tokens", "dtype", "torch_dtype", "training_arguments", "n_rows", "rows",
}  # fmt: skip
"""Names that people give the numbers around training arguments."""
MODEL_KEYS = {
    "model_type", "architectures", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads",
    "vocab_size", "decoder_start_token_id", "feed_forward_proj", "relative_attention_num_buckets", "tokenizer_len",
    "is_encoder_decoder", "layer_norm_epsilon", "n_positions", "tie_word_embeddings", "dropout_rate", "pad_token_id",
    "eos_token_id", "initializer_factor", "use_cache",
}  # fmt: skip


def _keys(data: Mapping[str, Any]) -> set[str]:
    """Its keys, and those one level down where it is a dict around training arguments."""
    found = set(map(str, data))
    for name in ("hf_training_arguments", "training_arguments"):
        if isinstance(data.get(name), dict):
            found |= set(map(str, data[name]))
    return found


# --- JSON, with the line of every key


def _read_json(text: str) -> tuple[Any, dict[PathParts, int]]:
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        cause = _json_cause(text, error)
        raise _NotReadable(
            "json-syntax",
            error.lineno,
            f"not valid JSON: {cause}",
            "JSON has no comments and no trailing commas; keys and texts stand in double quotes",
        ) from None
    except ValueError as error:
        name = str(error)
        line = text.count("\n", 0, max(0, text.find(name))) + 1
        raise _NotReadable("json-syntax", line, f"not valid JSON: {name}", "mend it") from None
    return data, dict(_json_lines(text))


def _refuse_constant(name: str) -> Any:
    return {"Infinity": math.inf, "-Infinity": -math.inf}.get(name, math.nan)


class _Duplicate(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Duplicate(f'key "{twice}" is given twice, the last one wins')
    return found


def _json_cause(text: str, error: json.JSONDecodeError) -> str:
    rest = text[error.pos :].lstrip()
    before = text[: error.pos].rstrip()
    if rest.startswith(("//", "#", "/*")):
        return "a comment stands here"
    if rest[:1] in ("}", "]") or before.endswith(","):
        return "a comma stands before the closing bracket"
    return error.msg[0].lower() + error.msg[1:]


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+|\n')


def _json_lines(text: str) -> Iterator[tuple[PathParts, int]]:
    """(parts, line) of every key of a text that is valid JSON."""
    line = 1
    path: list[str] = []
    in_object: list[bool] = []
    last = ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "\n":
            line += 1
            continue
        if token in "{[":
            in_object.append(token == "{")
            path.append("")
        elif token in "}]":
            in_object.pop()
            path.pop()
        elif token == ":" and in_object and in_object[-1]:
            path[-1] = json.loads(last)
            yield tuple(part for part in path if part), line
        last = token


# --- YAML, with the line of every key


class _Loader(yaml.SafeLoader):
    """The resolver of accelerate's own yaml.safe_load: `no` is a boolean here as there."""


def _read_yaml(text: str) -> tuple[Any, dict[PathParts, int]]:
    loader = _Loader(text) if not yaml.__with_libyaml__ else yaml.CSafeLoader(text)
    try:
        root = loader.get_single_node()
        lines: dict[PathParts, int] = {}
        reader = _NodeReader(loader, lines)
        return (None if root is None else reader.value(root, ())), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        if line and "\t" in text.splitlines()[min(line, len(text.splitlines())) - 1][:40]:
            problem = "a tab stands in the indentation"
        raise _NotReadable(
            "yaml-syntax",
            line,
            f"not valid YAML: {problem}",
            "indent with spaces, and quote texts that hold special characters",
        ) from None
    finally:
        loader.dispose()


class _NodeReader:
    """Plain values of a node graph, within limits."""

    def __init__(self, loader: Any, lines: dict[PathParts, int]) -> None:
        self.loader, self.lines, self.values = loader, lines, 0

    def value(self, node: yaml.Node, path: PathParts) -> Any:
        self.values += 1
        line = node.start_mark.line + 1
        if self.values > MOST_VALUES or len(path) > DEEPEST:
            raise _NotReadable("yaml-syntax", line, "it holds more values than any config", "give a config")
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(number))) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
                if key in found and key != "<<":
                    place = key_node.start_mark.line + 1
                    message = f"key {key} is given twice; the last one wins silently"
                    raise _NotReadable("yaml-syntax", place, message, "delete one of them")
                self.lines[(*path, key)] = key_node.start_mark.line + 1
                found[key] = self.value(value_node, (*path, key))
            return found
        try:
            return self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            problem = str(getattr(error, "problem", None) or error)
            raise _NotReadable("yaml-syntax", line, f"a value is not understood: {problem}", "quote it") from None
