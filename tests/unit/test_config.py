"""The loader: what it takes, what it refuses, and what it says about the place of a value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scaletool.config import LoadedConfig, RunConfig, known_keys, load_config
from scaletool.errors import ConfigError
from scaletool.record import write_json

KEYS = """
model.name model.init model.dropout_rate model.fp16_guard model.gradient_checkpointing
tokenizer.kind tokenizer.vocab_size tokenizer.path
data.train data.validation data.source data.target data.max_source_tokens data.max_target_tokens
data.per_device_batch_size data.batching data.max_batch_tokens data.pack_tokens data.streaming data.shuffle_buffer
data.delimiter data.on_bad_row data.num_workers data.cache_dir data.seed
train.mode train.max_steps train.epochs train.gradient_accumulation_steps train.learning_rate train.schedule
train.warmup_steps train.weight_decay train.max_grad_norm train.precision train.output_dir train.save_every train.keep
train.resume train.eval_every train.log_every train.seed
measure.steps measure.warmup_steps measure.rounds measure.timeout_seconds measure.record_samples
launch.profile launch.engine launch.world_size launch.scaling launch.measured launch.environment
""".split()
"""The public names of the run config. Renaming or removing one breaks users' files: that is a major version."""


def load(tmp_path: Path, text: str, *overrides: str) -> LoadedConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_keys_are_frozen() -> None:
    assert sorted(known_keys()) == sorted(KEYS)


def test_nothing_given_is_the_default() -> None:
    assert load_config(None).run == RunConfig()


def test_empty_file_and_empty_section_are_the_default(tmp_path: Path) -> None:
    assert load(tmp_path, "").run == RunConfig()
    assert load(tmp_path, "train:\ndata: {}\n").run == RunConfig()


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("train:\n  learning_rte: 1.0\n", "did you mean train.learning_rate?"),
        ("data:\n  epochs: 2\n", "did you mean train.epochs?"),
        ("train:\n  per_device_batch_size: 2\n", "did you mean data.per_device_batch_size?"),
        ("zzz:\n  qqq: 2\n", "known: data, launch, measure, model, tokenizer, train"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, text: str, suggestion: str) -> None:
    message = refusal(tmp_path, text)
    assert "unknown key" in message
    assert suggestion in message
    assert "run.yaml:2" in message


def test_unknown_key_of_set() -> None:
    with pytest.raises(ConfigError, match=r"unknown key train\.epoch") as caught:
        load_config(None, ["train.epoch=2"])
    assert caught.value.where == "--set train.epoch=2"
    assert caught.value.hint == "did you mean train.epochs?"


def test_set_without_a_value() -> None:
    with pytest.raises(ConfigError, match="has no value"):
        load_config(None, ["train.epochs"])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.epochs", "two", "expected an integer"),
        ("train.epochs", "1.5", "expected an integer"),
        ("train.epochs", "true", "expected an integer"),
        ("train.epochs", "null", "expected an integer"),
        ("train.learning_rate", "true", "expected a number"),
        ("train.learning_rate", "fast", "expected a number"),
        ("train.max_grad_norm", "'1'", "expected a number or null"),
        ("train.max_steps", "1.0", "expected an integer or null"),
        ("train.mode", "fsdp", 'expected "custom" or "trainer"'),
        ("launch.scaling", "both", 'expected "weak" or "strong" or null'),
        ("measure.record_samples", "1", "expected true or false"),
        ("data.streaming", "0", "expected true or false"),
        ("data.train", "[]", "expected a text or a list of texts"),
        ("data.train", "[1]", "expected a text or a list of texts"),
        ("data.train", "3", "expected a text or a list of texts"),
    ],
)
def test_wrong_type(tmp_path: Path, key: str, value: str, expected: str) -> None:
    section, name = key.split(".")
    message = refusal(tmp_path, f"{section}:\n  {name}: {value}\n")
    assert f"{key} is " in message
    assert expected in message
    assert f"run.yaml:2 ({key})" in message
    with pytest.raises(ConfigError, match=key):
        load_config(None, [f"{key}={value}"])


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "1E-4", "0.0001", "1_0e-5", "+1e-4"])
def test_every_spelling_of_a_float(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"train: {{learning_rate: {text}}}").run.train.learning_rate == 1e-4
    assert load_config(None, [f"train.learning_rate={text}"]).run.train.learning_rate == 1e-4


def test_integer_becomes_a_float(tmp_path: Path) -> None:
    rate = load(tmp_path, "train: {learning_rate: 1}").run.train.learning_rate
    assert (rate, type(rate)) == (1.0, float)


def test_one_text_is_a_list_of_one(tmp_path: Path) -> None:
    assert load(tmp_path, "data: {train: a.jsonl}").run.data.train == ["a.jsonl"]
    assert load(tmp_path, "data: {train: [a.jsonl, b.csv]}").run.data.train == ["a.jsonl", "b.csv"]
    assert load_config(None, ["data.train=[a.jsonl, b.csv]"]).run.data.train == ["a.jsonl", "b.csv"]


def test_validation_is_files_or_a_share(tmp_path: Path) -> None:
    assert load(tmp_path, "data: {validation: v.jsonl}").run.data.validation == ["v.jsonl"]
    assert load(tmp_path, "data: {validation: 0.1}").run.data.validation == 0.1
    assert load(tmp_path, "data: {validation: null}").run.data.validation is None


def test_null(tmp_path: Path) -> None:
    assert load(tmp_path, "train: {max_grad_norm: null}").run.train.max_grad_norm is None
    assert load(tmp_path, "train: {max_grad_norm: ~}").run.train.max_grad_norm is None
    assert load_config(None, ["train.max_grad_norm=null"]).run.train.max_grad_norm is None


def test_template_with_colon_and_equals_sign() -> None:
    loaded = load_config(None, ["data.source=summarize: {a} = {b}"])
    assert loaded.run.data.source == "summarize: {a} = {b}"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("train:\n  epochs: 1\n  epochs: 2\n", "lines 2 and 3"),
        ("train: {epochs: 1}\nmodel: {}\ntrain: {keep: 1}\n", "lines 1 and 3"),
    ],
)
def test_key_given_twice(tmp_path: Path, text: str, lines: str) -> None:
    message = refusal(tmp_path, text)
    assert "is given twice" in message
    assert lines in message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist"):
        load_config(tmp_path / "none.yaml")


def test_folder_and_wrong_encoding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("data: {source: 'é {a}'}".encode("latin-1"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("text", "line"), [("train:\n  epochs: [1, 2\nmodel: {}\n", 3), ("train:\n  a: 1\n b: 2\n", 3), ("a: 'x", 1)]
)
def test_malformed_yaml_has_a_line(tmp_path: Path, text: str, line: int) -> None:
    message = refusal(tmp_path, text)
    assert "not valid YAML" in message
    assert f"run.yaml:{line}" in message


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text\n", "train: 3\n", "train: [1]\n"])
def test_sections_must_be_mappings(tmp_path: Path, text: str) -> None:
    assert "must be a mapping" in refusal(tmp_path, text)


def test_where_tells_the_place(tmp_path: Path) -> None:
    loaded = load(tmp_path, "# comment\ntrain:\n  epochs: 2\n\n  keep: 3\n", "train.keep=4", "train.seed=1")
    path = tmp_path / "run.yaml"
    assert loaded.where("train.epochs") == f"{path}:3 (train.epochs)"
    assert loaded.where("train.keep") == "--set train.keep=4 (train.keep)"
    assert loaded.where("train.log_every") == "default (train.log_every)"
    assert dict(loaded.origins) == {
        "train.epochs": f"{path}:3",
        "train.keep": "--set train.keep=4",
        "train.seed": "--set train.seed=1",
    }
    assert loaded.run.train.keep == 4


def test_later_set_wins() -> None:
    assert load_config(None, ["train.epochs=2", "train.epochs=3"]).run.train.epochs == 3


def test_run_json_comes_back_the_same(tmp_path: Path) -> None:
    run = RunConfig().replace(
        train__learning_rate=1e-5,
        train__max_grad_norm=None,
        data__train=["ä b.jsonl", "c*.csv"],
        data__validation=0.02,
        data__source="q: {question}\n{context}",
        launch__environment={"ACCELERATE_MIXED_PRECISION": "no"},
        launch__scaling="weak",
        measure__timeout_seconds=1e9,
    )
    write_json(tmp_path / "run.json", run.to_dict())
    assert load_config(tmp_path / "run.json").run == run


def test_replace_leaves_the_original_alone() -> None:
    run = RunConfig()
    changed = run.replace(train__mode="trainer", data__seed=3)
    assert (changed.train.mode, changed.data.seed, changed.model) == ("trainer", 3, run.model)
    assert run == RunConfig()


def test_set_takes_texts_as_they_are() -> None:
    run = load_config(None, ["data.source=summarize: {article}", "data.target={summary}", "tokenizer.path=null"]).run
    assert run.data.source == "summarize: {article}"
    assert run.data.target == "{summary}"
    assert run.tokenizer.path is None


@pytest.mark.parametrize("text", ["max_steps: !!python/name:os.system", "max_steps: 2020-13-45", "max_steps: &x [*x]"])
def test_values_that_yaml_cannot_build(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"train:\n  {text}\n")
    with pytest.raises(ConfigError, match=r"max_steps") as caught:
        load_config(path)
    assert "run.yaml:2" in str(caught.value)


def test_senseless_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="beyond any sensible count"):
        load_config(None, ["train.max_steps=100000000000000000000"])


def test_emoji_and_half_pairs_survive_run_json(tmp_path: Path) -> None:
    run = RunConfig().replace(data__source="\U0001f600 {text}")
    write_json(tmp_path / "run.json", run.to_dict())
    assert load_config(tmp_path / "run.json").run.data.source == "\U0001f600 {text}"
    write_json(tmp_path / "half.json", {"reason": "\ud83d"})
    assert json.loads((tmp_path / "half.json").read_text()) == {"reason": "\ud83d"}
