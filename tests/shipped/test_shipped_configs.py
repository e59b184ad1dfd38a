"""Every shipped YAML and JSON goes through the parsers of accelerate and DeepSpeed that read it in a real launch."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scaletool import profiles
from scaletool.config import RunConfig

accelerate_launch = pytest.importorskip("accelerate.commands.launch")
accelerate_env = pytest.importorskip("accelerate.utils.launch")

STRATEGIES = ("ddp", "fsdp", "fsdp_grad_op", "hsdp", "zero1", "zero2", "zero2_offload", "zero3")
DEEPSPEED = tuple(name for name in STRATEGIES if name.startswith("zero"))
FSDP = ("fsdp", "fsdp_grad_op", "hsdp")
TWIN = "_4gpu"
NAMES = tuple(name + suffix for name in STRATEGIES for suffix in ("", TWIN))

FSDP1_ONLY = {
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sharding_strategy",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
}
"""Known to the launcher, ignored without a word by FSDP2."""


def strategy(name: str) -> str:
    return name.removesuffix(TWIN)


def path_of(name: str) -> Path:
    return profiles.shipped("accelerate_configs") / f"{name}.yaml"


def read_yaml(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path_of(name).read_text(encoding="utf-8"))
    return content


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((profiles.shipped("ds_configs") / f"{name}.json").read_text(encoding="utf-8"))
    return content


def parse(*flags: str) -> argparse.Namespace:
    """What `accelerate launch FLAGS -m scaletool.train` makes of its flags and of the YAML they name."""
    parser = accelerate_launch.launch_command_parser()
    args = parser.parse_args([*flags, "--main_process_port", "0", "-m", "scaletool.train"])
    args, defaults, precision_from_yaml = accelerate_launch._validate_launch_command(args)
    fields = list(defaults.deepspeed_config) + (["mixed_precision"] if precision_from_yaml else [])
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    return args


def worker_environment(args: argparse.Namespace) -> dict[str, str]:
    """The variables that the launcher exports to the workers."""
    environment: dict[str, str]
    if args.use_deepspeed:
        command, environment = accelerate_env.prepare_deepspeed_cmd_env(args)
        assert command is None, "standard launcher: accelerate starts the workers itself"
    else:
        environment = accelerate_env.prepare_multi_gpu_env(args)
    return environment


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, repository: Path) -> Any:
    """Parse flags as at the top of the checkout, and put the worker's environment in place."""
    monkeypatch.chdir(repository)

    def launch(*flags: str) -> tuple[argparse.Namespace, dict[str, str]]:
        args = parse(*flags)
        environment = worker_environment(args)
        for key, value in environment.items():
            if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
                monkeypatch.setenv(key, value)
        return args, environment

    return launch


# which files there are


def test_eight_profiles_and_their_twins() -> None:
    assert set(profiles.profile_names()) == set(NAMES)
    assert {path.stem for path in profiles.shipped("ds_configs").iterdir()} == set(DEEPSPEED)


@pytest.mark.parametrize("name", STRATEGIES)
def test_twins_differ_in_the_process_count_alone(name: str) -> None:
    eight, four = read_yaml(name), read_yaml(name + TWIN)
    nodes = eight["num_machines"]
    assert (eight.pop("num_processes"), four.pop("num_processes")) == (8 * nodes, 4 * nodes)
    if name == "hsdp":
        sizes = [content["parallelism_config"].pop("parallelism_config_dp_shard_size") for content in (eight, four)]
        assert sizes == [8, 4], "one shard group per node"
    assert eight == four


@pytest.mark.parametrize("name", NAMES)
def test_engine_is_the_name(name: str) -> None:
    assert profiles.find_profile(name).engine == strategy(name)


# accelerate


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_the_yaml(name: str) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(str(path_of(name)))
    assert config.num_machines == (2 if strategy(name) == "hsdp" else 1)
    assert config.use_cpu is False and config.debug is False


@pytest.mark.parametrize("name", NAMES)
def test_nested_keys_are_arguments_of_the_launcher(name: str) -> None:
    """accelerate ignores a misspelt nested key without a word."""
    known = set(vars(accelerate_launch.launch_command_parser().parse_args(["script.py"])))
    prefixes = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_", "deepspeed_config": ""}
    for section, content in read_yaml(name).items():
        if isinstance(content, dict):
            assert set(content) <= known, f"unknown in {section}: {set(content) - known}"
            assert all(key.startswith(prefixes[section]) for key in content)
            assert not set(content) & FSDP1_ONLY


@pytest.mark.parametrize("name", NAMES)
def test_launch_from_the_top_of_the_checkout(name: str, launched: Any) -> None:
    """`accelerate launch --config_file accelerate_configs/NAME.yaml -m scaletool.train`, up to starting the workers."""
    args, environment = launched("--config_file", f"accelerate_configs/{name}.yaml")
    content = read_yaml(name)
    assert args.num_processes == content["num_processes"]
    assert args.nproc_per_node == ("4" if name.endswith(TWIN) else "8")
    assert profiles.requested_engine({**environment, "LOCAL_RANK": "0"}) == strategy(name)
    if strategy(name) not in DEEPSPEED:
        assert environment["ACCELERATE_MIXED_PRECISION"] == "fp16"


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, world_size) for name in STRATEGIES for world_size in ((4, 8) if name == "hsdp" else (1, 2, 4))],
)
def test_launch_flags_of_the_driver(name: str, world_size: int, launched: Any, tmp_path: Path) -> None:
    """`scaletool` launches the same files for any process count, from any folder and in fp32 where there is no GPU."""
    for precision, expected in (("fp16", "fp16"), ("fp32", "no")):
        flags = profiles.find_profile(name).launch_flags(world_size, precision)
        args, environment = launched(*flags)
        assert (args.num_processes, args.num_machines, args.nproc_per_node) == (world_size, 1, str(world_size))
        assert profiles.requested_engine({**environment, "LOCAL_RANK": "0"}) == name
        if name in DEEPSPEED:
            assert Path(args.deepspeed_config_file).is_absolute()
        else:
            assert environment["ACCELERATE_MIXED_PRECISION"] == expected


@pytest.mark.parametrize("name", FSDP)
def test_fsdp_plugin_takes_every_choice(name: str, launched: Any) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    launched("--config_file", f"accelerate_configs/{name}.yaml")
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (name != "fsdp_grad_op")
    assert plugin.transformer_cls_names_to_wrap == ["T5Block"]
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert type(plugin.cpu_offload).__name__ == "OffloadPolicy", "CPUOffloadPolicy would be a hidden offload"
    assert not plugin.activation_checkpointing and not plugin.cpu_ram_efficient_loading


@pytest.mark.parametrize("name", ["hsdp", "hsdp_4gpu"])
def test_hsdp_shards_in_the_node_and_replicates_between_nodes(name: str, launched: Any) -> None:
    from accelerate.parallelism_config import ParallelismConfig

    args, _ = launched("--config_file", f"accelerate_configs/{name}.yaml")
    sizes = ParallelismConfig()
    assert sizes.dp_replicate_size == args.num_machines
    assert sizes.dp_shard_size == int(args.nproc_per_node)
    assert sizes.total_size == args.num_processes


def test_wrap_class_is_a_block_of_t5() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    assert {read_yaml(name)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] for name in FSDP} == {"T5Block"}
    assert "T5Block" in t5.T5PreTrainedModel._no_split_modules


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_plugin_finds_no_conflict_between_yaml_and_json(name: str, launched: Any) -> None:
    """accelerate refuses most keys that stand in the YAML beside a JSON, but only when the workers run."""
    from accelerate.utils import DeepSpeedPlugin

    args, _ = launched("--config_file", f"accelerate_configs/{name}.yaml")
    assert args.deepspeed_multinode_launcher == "standard"
    plugin = DeepSpeedPlugin()
    assert plugin.deepspeed_config["fp16"]["enabled"] is True
    assert plugin.zero_stage == read_json(name)["zero_optimization"]["stage"]
    assert plugin.zero3_init_flag is False


# DeepSpeed


class ReadKeys(dict[str, Any]):
    """A dict that remembers what was looked up in it."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def __copy__(self) -> ReadKeys:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadKeys:
        return self

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def bound(name: str, *, fp16: bool = True, max_grad_norm: float | None = 1.0) -> dict[str, Any]:
    """The JSON as the worker hands it to DeepSpeed, for one process."""
    run = RunConfig().replace(
        data__per_device_batch_size=8, train__gradient_accumulation_steps=2, train__max_grad_norm=max_grad_norm
    )
    return profiles.bind_deepspeed(profiles.shipped("ds_configs") / f"{name}.json", run, 1, half=fp16)


def deepspeed_config(content: dict[str, Any]) -> Any:
    return pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig(content)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_reads_the_json(name: str) -> None:
    content = ReadKeys({**bound(name), "no_such_key": 1})
    config = deepspeed_config(content)
    assert set(content) - content.read == {"no_such_key"}, "DeepSpeed never looks these up"
    assert config.train_batch_size == 16
    assert config.train_micro_batch_size_per_gpu == 8
    assert config.gradient_accumulation_steps == 2
    assert config.gradient_clipping == 1.0
    assert config.zero_enabled and config.zero_config.stage == read_json(name)["zero_optimization"]["stage"]
    assert config.zero_config.overlap_comm and config.zero_config.contiguous_gradients


@pytest.mark.parametrize("name", DEEPSPEED)
def test_json_leaves_to_the_run_config_what_it_owns(name: str) -> None:
    content = read_json(name)
    assert {key: content[key] for key in profiles.BATCH_KEYS} == dict.fromkeys(profiles.BATCH_KEYS, "auto")
    assert not {"optimizer", "scheduler", "bf16", "torch_autocast"} & set(content)
    without_clipping = deepspeed_config(bound(name, max_grad_norm=None))
    assert without_clipping.gradient_clipping == 0.0, "DeepSpeed clips at 1.0 unless told not to"


@pytest.mark.parametrize("name", DEEPSPEED)
@pytest.mark.parametrize("section", ["zero_optimization", "fp16"])
def test_deepspeed_refuses_a_misspelt_key(name: str, section: str) -> None:
    """So the unchanged sections, which pass, hold known keys only."""
    pydantic = pytest.importorskip("pydantic")
    content = copy.deepcopy(bound(name))
    content[section]["no_such_key"] = 1
    with pytest.raises(pydantic.ValidationError, match="no_such_key"):
        deepspeed_config(content)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_fp16_is_written_out(name: str) -> None:
    fp16 = read_json(name)["fp16"]
    assert fp16["enabled"] is True
    assert fp16["loss_scale"] == 0, "dynamic"
    assert 8 <= fp16["initial_scale_power"] <= 16, "higher starts with a row of skipped steps"
    assert deepspeed_config(bound(name)).float16_config.initial_scale_power == fp16["initial_scale_power"]
    assert deepspeed_config(bound(name, fp16=False)).float16_config.enabled is False


def test_fp16_settings_are_the_same_in_every_json() -> None:
    assert all(read_json(name)["fp16"] == read_json("zero2")["fp16"] for name in DEEPSPEED)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_only_the_offload_profile_offloads(name: str) -> None:
    zero = deepspeed_config(bound(name)).zero_config
    optimizer = zero.offload_optimizer.device if zero.offload_optimizer else "none"
    assert optimizer == ("cpu" if name == "zero2_offload" else "none")
    assert zero.offload_param is None


@pytest.mark.parametrize("name", NAMES)
def test_precision_stands_in_one_place(name: str) -> None:
    """fp16 in the YAML for ddp and FSDP, in the JSON for DeepSpeed: accelerate refuses both."""
    content = read_yaml(name)
    assert content.get("mixed_precision") == (None if strategy(name) in DEEPSPEED else "fp16")
    assert RunConfig().train.precision == "fp16"
