"""Profiles: which engine a file stands for, how it is launched, and what is bound into a DeepSpeed file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.profiles import (
    ENGINES,
    Profile,
    bind_deepspeed,
    find_profile,
    profile_names,
    requested_engine,
    shipped,
)

WORLD_SIZE = 4
NODE = RunConfig().replace(data__per_device_batch_size=8, train__gradient_accumulation_steps=2)


def bind(path: Path, max_grad_norm: float | None = 1.0, *, half: bool = True) -> dict[str, Any]:
    return bind_deepspeed(path, NODE.replace(train__max_grad_norm=max_grad_norm), WORLD_SIZE, half=half)


def profile(folder: Path, **content: Any) -> Profile:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return Profile("mine", path)


def deepspeed_file(folder: Path, content: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def zero(stage: int, device: str | None = None) -> dict[str, Any]:
    offload = {} if device is None else {"offload_optimizer": {"device": device}}
    return {"zero_optimization": {"stage": stage, **offload}}


# --- the engine


@pytest.mark.parametrize("name", profile_names())
def test_name_of_a_shipped_profile_is_its_engine(name: str) -> None:
    assert find_profile(name).engine == name.removesuffix("_4gpu")
    assert find_profile(name).engine in ENGINES


@pytest.mark.parametrize(
    ("content", "engine"),
    [
        ({"distributed_type": "MULTI_GPU"}, "ddp"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "fsdp"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
            "fsdp_grad_op",
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2},
                "parallelism_config": {"parallelism_config_dp_replicate_size": 2},
            },
            "hsdp",
        ),
    ],
)
def test_engine_by_content(content: dict[str, Any], engine: str, tmp_path: Path) -> None:
    assert profile(tmp_path, **content).engine == engine


@pytest.mark.parametrize(
    ("content", "engine"),
    [
        (zero(1), "zero1"),
        (zero(2), "zero2"),
        (zero(2, "cpu"), "zero2_offload"),
        (zero(2, "none"), "zero2"),
        (zero(3), "zero3"),
        (zero(3, "nvme"), "zero3_offload"),
    ],
)
def test_engine_by_deepspeed_file(content: dict[str, Any], engine: str, tmp_path: Path) -> None:
    path = deepspeed_file(tmp_path, content)
    named = profile(tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": "ds.json"})
    assert named.deepspeed_path == path.resolve()  # found beside the YAML
    assert named.engine == engine


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"distributed_type": "XLA"}, "distributed_type XLA is not supported"),
        ({"distributed_type": "DEEPSPEED"}, "has no deepspeed_config_file"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "none.json"}},
            "deepspeed_config_file none.json does not exist",
        ),
        ({"num_processes": 2}, "no distributed_type"),
    ],
)
def test_profile_that_stands_for_nothing(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = profile(tmp_path, **content).path
    with pytest.raises(ConfigError, match=message):
        find_profile(str(path))


@pytest.mark.parametrize("text", ["- a\n", "", "distributed_type: [\n"])
def test_profile_that_is_no_mapping(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        find_profile(str(path))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_deepspeed_file_that_is_no_object(text: str, tmp_path: Path) -> None:
    deepspeed_file(tmp_path, text)
    named = profile(tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": "ds.json"})
    with pytest.raises(ConfigError, match=r"ds\.json"):
        _ = named.engine


# --- finding


def test_profile_by_path(tmp_path: Path) -> None:
    path = profile(tmp_path, distributed_type="MULTI_GPU").path
    assert find_profile(str(path)) == Profile("mine", path.resolve())


@pytest.mark.parametrize(
    ("name", "hint"),
    [("zero_2", "did you mean zero2?"), ("qqqqq", "known: "), ("none.yaml", "known: ")],
)
def test_unknown_profile(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown profile {name}") as caught:
        find_profile(name)
    assert hint in (caught.value.hint or "")


# --- the launch line


def flags_of(name: str, world_size: int = 4, precision: str = "fp16") -> dict[str, str]:
    flags = find_profile(name).launch_flags(world_size, precision)
    assert len(flags) % 2 == 0
    return dict(zip(flags[::2], flags[1::2], strict=True))


def test_flags_of_ddp() -> None:
    assert flags_of("ddp") == {
        "--config_file": str(shipped("accelerate_configs") / "ddp.yaml"),
        "--num_processes": "4",
        "--num_machines": "1",
        "--machine_rank": "0",
    }


def test_other_precision_than_the_file() -> None:
    assert flags_of("ddp", precision="fp32")["--mixed_precision"] == "no"
    assert flags_of("fsdp", precision="bf16")["--mixed_precision"] == "bf16"


def test_deepspeed_file_is_named_and_keeps_its_precision() -> None:
    flags = flags_of("zero2", precision="fp32")
    assert flags["--deepspeed_config_file"] == str(shipped("ds_configs") / "zero2.json")
    assert "--mixed_precision" not in flags  # accelerate refuses it beside a DeepSpeed file


def test_hybrid_shards_follow_the_process_count() -> None:
    flags = flags_of("hsdp", world_size=8)
    assert flags["--parallelism_config_dp_replicate_size"] == "2"
    assert flags["--parallelism_config_dp_shard_size"] == "4"


# --- what the run config owns in a DeepSpeed file


def test_auto_and_missing_keys_are_filled(tmp_path: Path) -> None:
    path = deepspeed_file(tmp_path, {"gradient_clipping": "auto", "train_batch_size": "auto", **zero(2)})
    bound = bind(path, 0.5)
    assert bound["train_batch_size"] == 64
    assert bound["gradient_accumulation_steps"] == 2
    assert bound["gradient_clipping"] == 0.5
    assert 8 in bound.values()
    assert bound["zero_optimization"] == {"stage": 2}


def test_no_clipping_is_written_out(tmp_path: Path) -> None:
    bound = bind(deepspeed_file(tmp_path, {}), None)
    assert bound["gradient_clipping"] == 0.0  # a missing key would be read as 1.0


@pytest.mark.parametrize("fp16", [True, False])
def test_half_precision_is_switched_and_its_scale_kept(fp16: bool, tmp_path: Path) -> None:
    path = deepspeed_file(tmp_path, {"fp16": {"enabled": "auto", "initial_scale_power": 12}})
    bound = bind(path, half=fp16)
    assert bound["fp16"] == {"enabled": fp16, "initial_scale_power": 12}


def test_pinned_to_the_same_value_is_fine(tmp_path: Path) -> None:
    path = deepspeed_file(tmp_path, {"gradient_accumulation_steps": 2, "gradient_clipping": 1})
    assert bind(path, 1.0)["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("key", "value"), [("gradient_accumulation_steps", 4), ("gradient_clipping", 1.0), ("train_batch_size", 32)]
)
def test_pinned_to_another_value_is_refused(key: str, value: float, tmp_path: Path) -> None:
    path = deepspeed_file(tmp_path, {key: value})
    with pytest.raises(ConfigError, match=f"{key} is {value} in the DeepSpeed config") as caught:
        bind(path, 0.5)
    assert str(path) in (caught.value.where or "")
    assert '"auto"' in (caught.value.hint or "")


def test_shipped_files_pin_nothing() -> None:
    for path in sorted(shipped("ds_configs").glob("*.json")):
        assert bind(path, 0.25)["gradient_clipping"] == 0.25


# --- the launcher's variables


@pytest.mark.parametrize(
    ("environment", "engine"),
    [
        ({}, "single"),
        ({"LOCAL_RANK": "0"}, "ddp"),
        ({"LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "false"}, "ddp"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fsdp"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}, "fsdp"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_grad_op"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "hsdp"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"}, "fsdp"),
    ],
)
def test_requested_engine(environment: dict[str, str], engine: str) -> None:
    assert requested_engine(environment) == engine


def test_requested_engine_reads_the_deepspeed_file(tmp_path: Path) -> None:
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": ""}
    variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(deepspeed_file(tmp_path, zero(3, "cpu")))
    assert requested_engine(variables) == "zero3_offload"


@pytest.mark.parametrize(
    "environment",
    [
        {"ACCELERATE_USE_FSDP": "true"},
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none.json"},
    ],
)
def test_engine_that_cannot_be(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        requested_engine(environment)


@pytest.mark.parametrize(
    "content",
    [
        {"distributed_type": "DEEPSPEED", "deepspeed_config": [1]},
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": 3}},
        {"distributed_type": "FSDP", "fsdp_config": [1]},
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}},
        {"distributed_type": "TPU"},
    ],
)
def test_unusable_profiles_are_user_errors(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        find_profile(str(profile(tmp_path, **content).path))
