"""Every rule has values it refuses and the nearest ones it lets pass."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from scaletool.config import LoadedConfig, RunConfig, load_config
from scaletool.doctor.run_config import RULES, Finding, check_run, refuse_errors
from scaletool.errors import ConfigError

Values = dict[str, Any]
"""Dotted keys with "__" for the dot, as RunConfig.replace takes them."""

NAN, INF = math.nan, math.inf


def one(key: str, *values: Any) -> list[Values]:
    return [{key: value} for value in values]


EXAMPLES: dict[str, tuple[list[Values], list[Values]]] = {
    # rule: (refused, allowed)
    "model.dropout_rate-range": (one("model__dropout_rate", -0.1, 1.0, NAN), one("model__dropout_rate", 0.0, 0.99)),
    "data.max_source_tokens-range": (one("data__max_source_tokens", 1, 0), one("data__max_source_tokens", 2)),
    "data.max_target_tokens-range": (one("data__max_target_tokens", 1, -5), one("data__max_target_tokens", 2)),
    "data.per_device_batch_size-range": (one("data__per_device_batch_size", 0), one("data__per_device_batch_size", 1)),
    "data.num_workers-range": (one("data__num_workers", -1), one("data__num_workers", 0, 4)),
    "data.seed-range": (one("data__seed", -1, 2**32), one("data__seed", 0, 2**32 - 1)),
    "train.max_steps-range": (one("train__max_steps", 0, -1), one("train__max_steps", None, 1)),
    "train.epochs-range": (one("train__epochs", 0), one("train__epochs", 1)),
    "train.gradient_accumulation_steps-range": (
        one("train__gradient_accumulation_steps", 0),
        one("train__gradient_accumulation_steps", 1),
    ),
    "train.learning_rate-range": (one("train__learning_rate", 0.0, -1e-4, NAN, INF), one("train__learning_rate", 1e-9)),
    "train.warmup_steps-range": (one("train__warmup_steps", -1), one("train__warmup_steps", 0)),
    "train.weight_decay-range": (one("train__weight_decay", -0.01, NAN, INF), one("train__weight_decay", 0.0)),
    "train.max_grad_norm-range": (
        one("train__max_grad_norm", 0.0, -1.0, NAN, INF),
        one("train__max_grad_norm", None, 0.5),
    ),
    "train.keep-range": (one("train__keep", 0), one("train__keep", 1)),
    "train.eval_every-range": (
        [{"train__eval_every": 0, "data__validation": 0.1}],
        [{"train__eval_every": 1, "data__validation": 0.1}],
    ),
    "train.log_every-range": (one("train__log_every", 0), one("train__log_every", 1)),
    "train.seed-range": (one("train__seed", -1, 2**32), one("train__seed", 0, 2**32 - 1)),
    "measure.steps-range": (one("measure__steps", 0), one("measure__steps", 1)),
    "measure.warmup_steps-range": (one("measure__warmup_steps", -1), one("measure__warmup_steps", 0)),
    "measure.rounds-range": (one("measure__rounds", 0), one("measure__rounds", 1)),
    "measure.timeout_seconds-range": (
        one("measure__timeout_seconds", 0.0, NAN, INF),
        one("measure__timeout_seconds", 0.1),
    ),
    "model-no-tiny-checkpoint": (
        [{"model__init": "pretrained"}],
        [{"model__init": "pretrained", "model__name": "small"}, {"model__init": "scratch"}],
    ),
    "tokenizer-path": (
        [{"tokenizer__kind": "path"}, {"tokenizer__kind": "path", "tokenizer__path": ""}, {"tokenizer__path": "t"}],
        [{"tokenizer__kind": "path", "tokenizer__path": "t"}],
    ),
    "tokenizer-vocab-size": (
        [{"tokenizer__kind": "train", "tokenizer__vocab_size": 299}],
        [{"tokenizer__kind": "train", "tokenizer__vocab_size": 300}, {"tokenizer__vocab_size": 1}],
    ),
    "data-train-empty": (one("data__train", [], ["a.jsonl", " "]), one("data__train", ["a.jsonl"])),
    "data.max_batch_tokens-range": (
        [{"data__max_batch_tokens": 8, "data__per_device_batch_size": 1}],
        one("data__max_batch_tokens", None),
    ),
    "data.shuffle_buffer-range": (one("data__shuffle_buffer", 0), one("data__shuffle_buffer", 1, 1000)),
    "data-batch-tokens": (
        [
            {"data__max_batch_tokens": 400},  # with batches of 8 examples
            {"data__max_batch_tokens": 400, "data__per_device_batch_size": 1, "data__batching": "padded"},
            {"data__max_batch_tokens": 400, "data__per_device_batch_size": 1, "data__streaming": True},
        ],
        [{"data__max_batch_tokens": 400, "data__per_device_batch_size": 1}],
    ),
    "data-packed": (
        [
            {"data__batching": "packed", "data__streaming": True},
            {"data__pack_tokens": 512},
            {"data__pack_tokens": 255, "data__batching": "packed"},
        ],
        [{"data__batching": "packed"}, {"data__pack_tokens": 256, "data__batching": "packed"}],
    ),
    "data-delimiter": (one("data__delimiter", "", ";;", '"'), one("data__delimiter", ";", "\t", None)),
    "data-files": (
        one("data__train", ["no-such-*.jsonl"], ["a.jsonl", "no-such.csv"]),
        one("data__train", ["stdlib"], ["*.jsonl"]),
    ),
    "data-stdlib-alone": (one("data__train", ["stdlib", "a.jsonl"]), one("data__train", ["stdlib"], ["./a.jsonl"])),
    "data-validation": (
        one("data__validation", 0.0, 0.51, -0.1, NAN, [], [""]),
        one("data__validation", 0.5, 1e-6, None, ["v.jsonl"]),
    ),
    "data-template": (
        one(
            "data__source", "", "text", "{", "}", "{a", "a}", "{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>9}", "{{a}}"
        )
        + one("data__target", "{a.b}"),
        one("data__source", "{a}", "q: {a b} {{x}} {c}", "{{{a}}}") + one("data__target", "{highlights}"),
    ),
    "train-eval-without-data": (
        one("train__eval_every", 5),
        [{"train__eval_every": 5, "data__validation": ["v.jsonl"]}, {"data__validation": 0.1}],
    ),
    "train-checkpoints-unavailable": (
        [{"train__save_every": 10}, {"train__resume": "runs/a/step-10"}],
        one("train__resume", "auto", "never"),
    ),
}


@pytest.fixture(autouse=True)
def folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "v.jsonl"):
        (tmp_path / name).touch()


def findings(values: Values) -> list[Finding]:
    return check_run(LoadedConfig(RunConfig().replace(**values), {}))


def cases(side: int) -> list[Any]:
    return [
        pytest.param(name, values, id=f"{name}-{number}")
        for name, sides in EXAMPLES.items()
        for number, values in enumerate(sides[side])
    ]


def test_every_rule_has_examples_of_both_kinds() -> None:
    assert set(EXAMPLES) == set(RULES)
    assert [name for name, (bad, good) in EXAMPLES.items() if not bad or not good] == []


@pytest.mark.parametrize(("name", "values"), cases(0))
def test_refused(name: str, values: Values) -> None:
    found = findings(values)
    assert [finding.rule for finding in found] == [name]
    (finding,) = found
    assert finding.severity == "error"
    assert finding.message.startswith(finding.key)
    assert finding.fix


@pytest.mark.parametrize(("name", "values"), cases(1))
def test_allowed(name: str, values: Values) -> None:
    assert findings(values) == []


def test_default_has_no_findings() -> None:
    assert findings({}) == []


def test_bf16_is_left_to_the_gpu_check() -> None:
    assert findings({"train__precision": "bf16"}) == []


def test_finding_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        findings({"train__epochs": 0})[0].key = "x"  # type: ignore[misc]


def test_refuse_errors_tells_all_of_them_with_their_places() -> None:
    loaded = load_config(None, ["train.learning_rate=0", "train.max_grad_norm=0", "data.target=none"])
    with pytest.raises(ConfigError) as caught:
        refuse_errors(loaded)
    message = str(caught.value)
    assert caught.value.exit_status == 2
    for part in (
        "train.learning_rate is 0.0",
        "--set train.learning_rate=0 (train.learning_rate)",
        "train.max_grad_norm is 0.0",
        "hint: give a positive norm, or null for no clipping",
        "data.target is 'none'",
    ):
        assert part in message
    assert message.count("hint:") == 3


def test_refuse_errors_lets_a_good_config_pass() -> None:
    refuse_errors(load_config(None))
