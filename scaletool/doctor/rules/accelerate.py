"""Rules over configs of `accelerate launch`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaletool.doctor.documents import Document, read
from scaletool.doctor.registry import Context, Edit, Problem, rule
from scaletool.doctor.schemas import schemas

GOOD = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
gpu_ids: 0,1,2,3
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
use_cpu: false
"""
TWO_MACHINES = """\
distributed_type: MULTI_GPU
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 21000
mixed_precision: fp16
num_machines: 2
num_processes: 16
rdzv_backend: static
"""
FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: T5Block
  fsdp_version: 2
mixed_precision: fp16
num_machines: 1
num_processes: 8
"""
DEEPSPEED = """\
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: false
num_machines: 1
num_processes: 8
"""
DS_JSON = """\
{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "zero_optimization": {"stage": 2},
  "fp16": {"enabled": true, "initial_scale_power": 12}
}
"""

ON_GPUS = ("MULTI_GPU", "DEEPSPEED", "FSDP", "MEGATRON_LM")
OLD_KEYS = {
    "fp16": "write mixed_precision: fp16",
    "use_ipex": "delete it",
    "ipex_config": "delete it",
    "mpi_config": "delete it",
    "main_process_address": "write main_process_ip",
    "deepspeed_fields_from_accelerate_config": "delete it",
    "fsdp_config_fields_from_accelerate_config": "delete it",
    "tpu_config": "delete it",
    "num_gpus": "write num_processes",
}
"""Keys of older releases or of habit, and what to do."""
INLINE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys of deepspeed_config that must not stand beside a DeepSpeed file."""
FSDP1_KEYS = {
    "fsdp_sharding_strategy": "write fsdp_reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
    "fsdp_backward_prefetch": "delete it",
    "fsdp_backward_prefetch_policy": "delete it",
    "fsdp_forward_prefetch": "delete it",
    "fsdp_sync_module_states": "delete it",
    "fsdp_use_orig_params": "delete it",
}
T5_BLOCKS = ("T5Block", "MT5Block", "UMT5Block")


def integer(config: Document, key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def block(config: Document, name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def is_ours(config: Document) -> bool:
    """A config for GPUs of this or that machine; clouds and TPUs are others' business."""
    return str(config.get("compute_environment", "LOCAL_MACHINE")) == "LOCAL_MACHINE" and "TPU" not in str(
        config.get("distributed_type")
    )


def gpu_list(config: Document) -> list[str] | None:
    """The ids that gpu_ids names; None for all."""
    ids = config.get("gpu_ids")
    if ids is None or str(ids).strip().lower() == "all":
        return None
    return [str(each).strip() for each in ids] if isinstance(ids, list) else str(ids).split(",")


@rule(
    "accelerate-gpu-ids-list",
    "error",
    "accelerate",
    bad=GOOD.replace("0,1,2,3", "[0, 1, 2, 3]"),
    good=GOOD,
    link="AttributeError in accelerate 1.15.0",
)
def gpu_ids_list(config: Document, context: Context) -> Iterator[Problem]:
    """gpu_ids has to be a text: the launcher splits it at commas, and ends with an AttributeError on a list."""
    ids = config.get("gpu_ids")
    if isinstance(ids, list):
        text = ",".join(map(str, ids))
        message = f"gpu_ids is a list of {len(ids)}, the launcher expects a text"
        yield Problem("gpu_ids", message, f'write gpu_ids: "{text}"', (Edit("set", "gpu_ids", text),))


@rule(
    "accelerate-gpu-ids-count",
    "warning",
    "accelerate",
    bad=GOOD.replace("0,1,2,3", "0,1,2,3,4,5"),
    good=GOOD,
    link="huggingface/accelerate#2920",
)
def gpu_ids_count(config: Document, context: Context) -> Iterator[Problem]:
    """gpu_ids only sets CUDA_VISIBLE_DEVICES. More ids than processes leave GPUs idle without a word; fewer put two
    processes on a GPU or end in an invalid device."""
    ids, processes, machines = gpu_list(config), integer(config, "num_processes"), integer(config, "num_machines") or 1
    if not ids or not processes or machines < 1:
        return
    here = processes // machines
    if len(set(ids)) < len(ids):
        yield Problem("gpu_ids", f"gpu_ids names a GPU twice: {','.join(ids)}", "name each once")
    elif len(ids) > here:
        idle = ",".join(ids[here:])
        message = f"gpu_ids names {len(ids)} GPUs, but num_processes gives {here} processes a machine: {idle} stay idle"
        yield Problem(
            "gpu_ids", message, f'set num_processes: {len(ids) * machines}, or gpu_ids: "{",".join(ids[:here])}"'
        )
    elif len(ids) < here:
        message = f"gpu_ids names {len(ids)} GPUs for {here} processes: some have no GPU of their own"
        yield Problem("gpu_ids", message, f"set num_processes: {len(ids) * machines}", severity="error")


@rule(
    "accelerate-one-process",
    "warning",
    "accelerate",
    bad=GOOD.replace("num_processes: 4", "num_processes: 1").replace("0,1,2,3", "all"),
    good=GOOD,
    link="huggingface/accelerate#1746",
)
def one_process(config: Document, context: Context) -> Iterator[Problem]:
    """A config for many GPUs with one process runs on one GPU, silently."""
    kind = config.get("distributed_type")
    if kind in ("MULTI_GPU", "FSDP") and integer(config, "num_processes") == 1 and not is_single_rank_of_many(config):
        message = f"distributed_type is {kind}, but num_processes: 1 uses one GPU"
        yield Problem("num_processes", message, "set num_processes to the number of GPUs, or distributed_type: 'NO'")


def is_single_rank_of_many(config: Document) -> bool:
    return (integer(config, "num_machines") or 1) > 1


@rule(
    "accelerate-processes-missing",
    "error",
    "accelerate",
    bad=GOOD.replace("num_processes: 4\n", ""),
    good=GOOD,
    link="ValueError in accelerate 1.15.0",
)
def processes_missing(config: Document, context: Context) -> Iterator[Problem]:
    """Without num_processes the launcher asks for it on the command line."""
    if is_ours(config) and config.get("num_processes") is None and not _misspelt(config, "num_processes"):
        if config.get("distributed_type") in ON_GPUS:
            counts = ", ".join(map(str, context.counts))
            yield Problem(
                "num_processes", "num_processes is missing", f"give the GPUs over all machines, such as {counts}"
            )


def _misspelt(config: Document, name: str) -> bool:
    return bool(difflib.get_close_matches(name, [str(key) for key in config.data if key != name], 1, 0.85))


@rule(
    "accelerate-processes-divisible",
    "error",
    "accelerate",
    bad=TWO_MACHINES.replace("16", "15"),
    good=TWO_MACHINES,
    link="accelerate 1.15.0 starts 15 // 2 = 7 on each and waits",
)
def processes_divisible(config: Document, context: Context) -> Iterator[Problem]:
    """num_processes counts over all machines; each starts its part, rounded down, and waits for the missing ones."""
    processes, machines = integer(config, "num_processes"), integer(config, "num_machines")
    if processes is not None and processes < 1:
        yield Problem("num_processes", f"num_processes is {processes}", "give 1 or more")
    elif processes and machines and machines > 1 and processes % machines:
        message = (
            f"num_processes {processes} is no multiple of num_machines {machines}: it is the total over all machines"
        )
        yield Problem(
            "num_processes",
            message,
            f"set {(processes // machines + 1) * machines} or {processes // machines * machines or machines}",
        )


@rule(
    "accelerate-machine-rank",
    "error",
    "accelerate",
    bad=TWO_MACHINES.replace("machine_rank: 0", "machine_rank: 2"),
    good=TWO_MACHINES,
    link="huggingface/accelerate#2816",
)
def machine_rank(config: Document, context: Context) -> Iterator[Problem]:
    """machine_rank counts from 0 to num_machines - 1."""
    rank, machines = integer(config, "machine_rank"), integer(config, "num_machines") or 1
    if rank is not None and not 0 <= rank < max(1, machines):
        message = f"machine_rank is {rank}, of num_machines {machines}"
        yield Problem("machine_rank", message, f"give a number from 0 to {max(0, machines - 1)} on each machine")


@rule(
    "accelerate-no-meeting-place",
    "error",
    "accelerate",
    bad=TWO_MACHINES.replace("10.0.0.1", "localhost"),
    good=TWO_MACHINES,
    link="huggingface/accelerate#1489",
)
def meeting_place(config: Document, context: Context) -> Iterator[Problem]:
    """Several machines meet at the address of the first. Without one each forms a world of its own, or waits."""
    machines, address = integer(config, "num_machines") or 1, config.get("main_process_ip")
    if machines < 2 or not is_ours(config):
        return
    if address in ("localhost", "127.0.0.1", "::1"):
        message = f"main_process_ip is {address}, which on each of the {machines} machines is that machine itself"
        yield Problem("main_process_ip", message, "give the first machine's address in the network")
    elif not address and config.get("main_process_port") is not None:
        message = f"main_process_port is given, but not main_process_ip, for {machines} machines"
        yield Problem("main_process_ip", message, "give the first machine's address, here or at the launch")


@rule(
    "accelerate-rendezvous",
    "warning",
    "accelerate",
    bad=TWO_MACHINES.replace("static", "c10d"),
    good=TWO_MACHINES,
    link="measured: c10d put rank 0 on the second machine",
)
def rendezvous(config: Document, context: Context) -> Iterator[Problem]:
    """The c10d rendezvous ignores machine_rank: rank 0 can land on any machine, and the port of the process group is
    another than the one given."""
    if config.get("rdzv_backend") == "c10d" and (integer(config, "num_machines") or 1) > 1:
        message = "rdzv_backend is c10d, which gives ranks without regard to machine_rank"
        yield Problem("rdzv_backend", message, "write static", (Edit("set", "rdzv_backend", "static"),))


@rule(
    "accelerate-precision-boolean",
    "error",
    "accelerate",
    bad=GOOD.replace("fp16", "no"),
    good=GOOD.replace("fp16", "'no'"),
    link="huggingface/accelerate#1386",
)
def precision_boolean(config: Document, context: Context) -> Iterator[Problem]:
    """YAML reads a plain `no` as false, on which accelerate ends with an AttributeError."""
    value = config.get("mixed_precision")
    if isinstance(value, bool):
        text = "no" if value is False else "fp16"
        message = f"mixed_precision is the boolean {str(value).lower()}: YAML reads an unquoted no, yes, on or off so"
        yield Problem("mixed_precision", message, f"quote it: '{text}'", (Edit("set", "mixed_precision", text),))


@rule(
    "accelerate-precision-unknown",
    "error",
    "accelerate",
    bad=GOOD.replace("fp16", "float16"),
    good=GOOD,
    link="ValueError in accelerate 1.15.0",
)
def precision_unknown(config: Document, context: Context) -> Iterator[Problem]:
    """accelerate knows no, fp16, bf16 and fp8."""
    value = config.get("mixed_precision")
    if value is None or isinstance(value, bool) or str(value).lower() in ("no", "fp16", "bf16", "fp8"):
        return
    fix = "write fp16" if "16" in str(value) else "write 'no' or fp16"
    yield Problem("mixed_precision", f"mixed_precision is {value!r}, not one of no, fp16, bf16, fp8", fix)


@rule(
    "accelerate-bf16",
    "error",
    "accelerate",
    bad=GOOD.replace("fp16", "bf16"),
    good=GOOD,
    link="huggingface/accelerate#1693, pytorch/pytorch#124996",
)
def bf16(config: Document, context: Context) -> Iterator[Problem]:
    """A V100 has no bf16 units; torch emulates them without a word, slower than float32. fp8 needs Hopper."""
    value = str(config.get("mixed_precision")).lower()
    if value == "bf16" and not context.gpu.has_bf16:
        message = (
            f"mixed_precision is bf16 on a {context.gpu.name} (compute capability {_capability(context)}): it has no "
        )
        edit = Edit("set", "mixed_precision", "fp16")
        yield Problem(
            "mixed_precision", message + "bf16 units, they are emulated", "write mixed_precision: fp16", (edit,)
        )
    if value == "fp8" and context.gpu.capability < (8, 9):
        message = f"mixed_precision is fp8 on a {context.gpu.name}, which has no fp8 units"
        yield Problem(
            "mixed_precision", message, "write mixed_precision: fp16", (Edit("set", "mixed_precision", "fp16"),)
        )


def _capability(context: Context) -> str:
    return ".".join(map(str, context.gpu.capability))


@rule(
    "accelerate-unknown-key",
    "error",
    "accelerate",
    bad=GOOD.replace("num_machines", "num_machine"),
    good=GOOD,
    link="huggingface/accelerate#1935: ValueError, unknown keys",
)
def unknown_key(config: Document, context: Context) -> Iterator[Problem]:
    """The launcher refuses a config with a key that it does not know. Old releases wrote keys that today's has not."""
    known = schemas().accelerate
    if str(config.get("compute_environment")) == "AMAZON_SAGEMAKER":
        return
    for key, value in config.data.items():
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, 1, 0.75)
        if key in OLD_KEYS:
            fix, edits = OLD_KEYS[key], [Edit("delete", key)]
            if key == "fp16" and value is True and config.get("mixed_precision") is None:
                edits.append(Edit("set", "mixed_precision", "fp16"))
        elif near and near[0] not in config.data:
            fix, edits = f"did you mean {near[0]}?", [Edit("rename", key, near[0])]
        else:
            fix, edits = "delete it", [Edit("delete", key)]
        message = f"{key} is no key of accelerate {schemas().versions['accelerate']}: the launch ends with a ValueError"
        yield Problem(key, message, fix, tuple(edits))


@rule(
    "accelerate-unknown-nested-key",
    "warning",
    "accelerate",
    bad=FSDP.replace("fsdp_reshard_after_forward", "fsdp_reshard_after_forwrd"),
    good=FSDP,
    link="huggingface/accelerate#2288",
)
def unknown_nested_key(config: Document, context: Context) -> Iterator[Problem]:
    """A key inside fsdp_config or deepspeed_config that accelerate does not know is dropped silently, and the default
    applies."""
    known = schemas().accelerate_nested
    for name in ("fsdp_config", "deepspeed_config"):
        if not _is_used(config, name):
            continue
        for key, value in block(config, name).items():
            if key in known or f"fsdp_{key}" in known or f"deepspeed_{key}" in known or key in ("zero3_init_flag",):
                continue
            near = difflib.get_close_matches(str(key), known, 1, 0.8)
            fix = f"did you mean {near[0]}?" if near else "delete it"
            edits: tuple[Edit, ...] = ()
            if key == "fsdp_backward_prefetch_policy":
                fix = "write fsdp_backward_prefetch, or delete it under fsdp_version 2"
            elif near and near[0] not in block(config, name):
                edits = (Edit("rename", f"{name}.{key}", near[0]),)
            message = (
                f"{key} ({value!r}) is dropped silently: accelerate {schemas().versions['accelerate']} has no such key"
            )
            yield Problem(f"{name}.{key}", message, fix, edits)


def _is_used(config: Document, name: str) -> bool:
    wanted = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}[name]
    return bool(config.get("distributed_type") == wanted)


@rule(
    "accelerate-deepspeed-twice",
    "error",
    "accelerate",
    bad={"a.yaml": DEEPSPEED.replace("  zero3", "  zero_stage: 2\n  zero3"), "ds.json": DS_JSON},
    good={"a.yaml": DEEPSPEED, "ds.json": DS_JSON},
    link="huggingface/accelerate#941: ValueError in every rank, after the launch",
)
def deepspeed_twice(config: Document, context: Context) -> Iterator[Problem]:
    """Beside a DeepSpeed file, settings of the same things are refused by every rank, after the launch. The file
    wins."""
    inside = block(config, "deepspeed_config")
    if not _is_used(config, "deepspeed_config") or not inside.get("deepspeed_config_file"):
        return
    twice = [f"deepspeed_config.{key}" for key in INLINE if key in inside]
    if config.get("mixed_precision") is not None:  # any is counted, even 'no'
        twice.append("mixed_precision")
    if twice:
        names = ", ".join(key.split(".")[-1] for key in twice)
        message = f"deepspeed_config_file {inside['deepspeed_config_file']} is named, and {names} stand here too"
        edits = tuple(Edit("delete", key) for key in twice)
        yield Problem(twice[0], message, f"delete {names} here, and set them in the file, which holds them all", edits)


@rule(
    "accelerate-deepspeed-file",
    "error",
    "accelerate",
    bad=DEEPSPEED.replace("ds.json", "no-such.json"),
    good={"a.yaml": DEEPSPEED, "ds.json": DS_JSON},
)
def deepspeed_file(config: Document, context: Context) -> Iterator[Problem]:
    """A relative path is looked up from the folder of the launch, not from the config's."""
    named = block(config, "deepspeed_config").get("deepspeed_config_file")
    if not _is_used(config, "deepspeed_config") or not named:
        return
    if not isinstance(named, str):
        yield Problem(
            "deepspeed_config.deepspeed_config_file", f"deepspeed_config_file is {named!r}", "name a JSON file"
        )
        return
    given = [document for document in context.of("deepspeed") if Path(document.path).name == Path(named).name]
    folder = Path(config.path).parent
    places = [Path(named).expanduser(), folder / named, folder.parent / named]
    try:
        found = next((place for place in places if place.is_file()), None)
    except (OSError, ValueError):
        found = None
    if not given and found is None:
        message = f"deepspeed_config_file {named} does not exist (looked from {Path.cwd().name}/ and beside the config)"
        yield Problem("deepspeed_config.deepspeed_config_file", message, "give the path from where the launch starts")
    elif not given and found is not None:
        for fault in read(str(found)).faults:
            yield Problem("deepspeed_config.deepspeed_config_file", f"{found}: {fault.message}", fault.fix)


@rule(
    "accelerate-deepspeed-empty",
    "warning",
    "accelerate",
    bad="distributed_type: DEEPSPEED\nmixed_precision: fp16\nnum_machines: 1\nnum_processes: 4\n",
    good={"a.yaml": DEEPSPEED, "ds.json": DS_JSON},
)
def deepspeed_empty(config: Document, context: Context) -> Iterator[Problem]:
    """Without any settings DeepSpeed gets accelerate's defaults: ZeRO-2, and gradients clipped at 1.0."""
    if config.get("distributed_type") == "DEEPSPEED" and not block(config, "deepspeed_config"):
        message = "distributed_type is DEEPSPEED, but deepspeed_config is empty: stage 2, clipping at 1.0 by default"
        yield Problem("deepspeed_config", message, "name a deepspeed_config_file, or a zero_stage")


@rule(
    "accelerate-launcher-on-one-machine",
    "error",
    "accelerate",
    bad=TWO_MACHINES.replace("MULTI_GPU", "DEEPSPEED")
    + "deepspeed_config:\n  deepspeed_multinode_launcher: slrum\n  zero_stage: 2\n",
    good=TWO_MACHINES.replace("MULTI_GPU", "DEEPSPEED")
    + "deepspeed_config:\n  deepspeed_multinode_launcher: standard\n  zero_stage: 2\n",
    link="huggingface/accelerate#1837",
)
def multinode_launcher(config: Document, context: Context) -> Iterator[Problem]:
    """accelerate knows a fixed list of multi-node launchers; pdsh, its default, needs a hostfile and ssh."""
    known = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
    value = block(config, "deepspeed_config").get("deepspeed_multinode_launcher")
    if value is not None and value not in known:
        yield Problem(
            "deepspeed_config.deepspeed_multinode_launcher",
            f"deepspeed_multinode_launcher is {value!r}",
            f"one of {', '.join(known)}",
        )
    elif value == "pdsh" and not block(config, "deepspeed_config").get("deepspeed_hostfile"):
        if (integer(config, "num_machines") or 1) > 1:
            message = "deepspeed_multinode_launcher is pdsh, but no deepspeed_hostfile is named"
            yield Problem(
                "deepspeed_config.deepspeed_multinode_launcher", message, "write standard, and launch on every machine"
            )


@rule(
    "accelerate-fsdp2-keys",
    "warning",
    "accelerate",
    bad=FSDP.replace("  fsdp_version", "  fsdp_use_orig_params: true\n  fsdp_version"),
    good=FSDP,
    link="huggingface/accelerate#3394, huggingface/transformers#45640",
)
def fsdp2_keys(config: Document, context: Context) -> Iterator[Problem]:
    """FSDP2 has other settings than FSDP1; those of FSDP1 have no effect, or warn."""
    inside = block(config, "fsdp_config")
    if inside.get("fsdp_version") != 2 or not _is_used(config, "fsdp_config"):
        return
    for key, fix in FSDP1_KEYS.items():
        if key in inside and key in schemas().accelerate_nested:
            edits = [Edit("delete", f"fsdp_config.{key}")]
            if key == "fsdp_sharding_strategy" and "fsdp_reshard_after_forward" not in inside:
                keeps = str(inside[key]).upper() in ("SHARD_GRAD_OP", "2")
                edits.append(Edit("set", "fsdp_config.fsdp_reshard_after_forward", not keeps))
            yield Problem(
                f"fsdp_config.{key}", f"{key} ({inside[key]!r}) is of FSDP1: no effect in FSDP2", fix, tuple(edits)
            )


@rule(
    "accelerate-fsdp1-reshard",
    "error",
    "accelerate",
    bad=FSDP.replace("fsdp_version: 2", "fsdp_version: 1"),
    good=FSDP,
    link="ValueError in accelerate 1.15.0",
)
def fsdp1_reshard(config: Document, context: Context) -> Iterator[Problem]:
    """fsdp_reshard_after_forward is a boolean in FSDP2 and a strategy's name in FSDP1; accelerate refuses the other."""
    inside = block(config, "fsdp_config")
    value, version = inside.get("fsdp_reshard_after_forward"), inside.get("fsdp_version", 1)
    if not _is_used(config, "fsdp_config") or value is None:
        return
    if version == 2 and not isinstance(value, bool):
        message = f"fsdp_reshard_after_forward is {value!r}, in FSDP2 it is true or false"
        yield Problem(
            "fsdp_config.fsdp_reshard_after_forward", message, "write true for FULL_SHARD, false for SHARD_GRAD_OP"
        )
    elif version != 2 and isinstance(value, bool):
        message = f"fsdp_reshard_after_forward is a boolean, which FSDP1 (fsdp_version {version}) refuses"
        yield Problem("fsdp_config.fsdp_reshard_after_forward", message, "set fsdp_version: 2")


@rule(
    "accelerate-wrap-class",
    "error",
    "accelerate",
    bad=FSDP.replace("T5Block", "T5Blok"),
    good=FSDP,
    link="huggingface/accelerate#1943, #3201, #3811",
)
def wrap_class(config: Document, context: Context) -> Iterator[Problem]:
    """The class whose instances are sharded one by one is looked up when the model is prepared, long after the
    launch."""
    key = "fsdp_transformer_layer_cls_to_wrap"
    value = block(config, "fsdp_config").get(key)
    if not _is_used(config, "fsdp_config") or not isinstance(value, str):
        return
    for name in (part.strip() for part in value.split(",")):
        near = difflib.get_close_matches(name, T5_BLOCKS, 1, 0.75)
        if name and name not in T5_BLOCKS and near and not (name.endswith("Block") and "T5" in name):
            edit = Edit("set", f"fsdp_config.{key}", value.replace(name, near[0]))
            yield Problem(f"fsdp_config.{key}", f"{key} is {name}: no such class", f"write {near[0]}", (edit,))
        elif name in ("T5Stack", "T5ForConditionalGeneration", "T5LayerFF", "T5Attention"):
            message = f"{key} is {name}, which is not the repeated block"
            yield Problem(f"fsdp_config.{key}", message, "write T5Block", severity="warning")


@rule(
    "accelerate-fsdp-loading",
    "error",
    "accelerate",
    bad=FSDP.replace("  fsdp_version: 2", "  fsdp_sync_module_states: false"),
    good=FSDP,
    link="ValueError in accelerate 1.15.0",
)
def fsdp_loading(config: Document, context: Context) -> Iterator[Problem]:
    """With efficient loading only rank 0 has the weights; without syncing, the others would train on noise. The
    launcher refuses it."""
    inside = block(config, "fsdp_config")
    if inside.get("fsdp_cpu_ram_efficient_loading") is True and inside.get("fsdp_sync_module_states") is False:
        message = "fsdp_cpu_ram_efficient_loading is true, but fsdp_sync_module_states false"
        yield Problem("fsdp_config.fsdp_sync_module_states", message, "delete fsdp_sync_module_states")


@rule(
    "accelerate-two-engines",
    "warning",
    "accelerate",
    bad=FSDP + "deepspeed_config:\n  zero_stage: 2\n",
    good=FSDP,
    link="measured: exit status 0, nothing said",
)
def two_engines(config: Document, context: Context) -> Iterator[Problem]:
    """distributed_type picks one engine; the other's block has no effect, silently."""
    kind = config.get("distributed_type")
    for name, wanted in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if block(config, name) and kind is not None and kind != wanted:
            message = f"{name} has no effect: distributed_type is {kind}"
            yield Problem(name, message, f"delete it, or set distributed_type: {wanted}")


@rule(
    "accelerate-debug",
    "warning",
    "accelerate",
    bad=GOOD + "debug: true\n",
    good=GOOD + "debug: false\n",
    link="huggingface/accelerate#1756",
)
def debug(config: Document, context: Context) -> Iterator[Problem]:
    """debug checks the shapes of all ranks before every collective: one more pickled gather each. Handing out a batch
    took 1.89 ms instead of 1.16 ms, gathering a scalar 1.32 ms instead of 0.43 ms."""
    if config.get("debug") is True:
        message = "debug is true: an extra gather before every collective (1.32 instead of 0.43 ms for a scalar)"
        yield Problem("debug", message, "set debug: false", (Edit("set", "debug", False),))


@rule(
    "accelerate-type-and-count",
    "error",
    "accelerate",
    bad=GOOD.replace("MULTI_GPU", "'NO'"),
    good=GOOD,
    link="huggingface/accelerate#1746",
)
def type_and_count(config: Document, context: Context) -> Iterator[Problem]:
    """distributed_type NO starts one process, whatever num_processes says."""
    kind, processes = config.get("distributed_type"), integer(config, "num_processes")
    if kind in ("NO", False) and processes and processes > 1:
        message = f"distributed_type is NO, which starts one process; num_processes is {processes}"
        edit = Edit("set", "distributed_type", "MULTI_GPU")
        yield Problem("distributed_type", message, "set distributed_type: MULTI_GPU", (edit,))


@rule(
    "accelerate-type-unknown",
    "error",
    "accelerate",
    bad=GOOD.replace("MULTI_GPU", "MULTI-GPU"),
    good=GOOD,
    link="ValueError in accelerate 1.15.0",
)
def type_unknown(config: Document, context: Context) -> Iterator[Problem]:
    """The names of distributed_type are fixed; a plain NO is a boolean to YAML, which accelerate understands."""
    value = config.get("distributed_type")
    if value is None or isinstance(value, bool) or str(value).upper() in TYPES:
        return
    near = difflib.get_close_matches(str(value).upper(), TYPES, 1, 0.5)
    fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(TYPES)}"
    yield Problem("distributed_type", f"distributed_type is {value!r}", fix)


TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
    "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "TPU", "MEGATRON_LM", "TP",
)  # fmt: skip


@rule(
    "accelerate-use-cpu",
    "warning",
    "accelerate",
    bad=GOOD.replace("use_cpu: false", "use_cpu: true"),
    good=GOOD,
    link="measured: ignored by the launchers for several GPUs, DeepSpeed and FSDP",
)
def use_cpu(config: Document, context: Context) -> Iterator[Problem]:
    """use_cpu counts only where one process is started without an engine."""
    if config.get("use_cpu") is True and config.get("distributed_type") in ON_GPUS:
        message = f"use_cpu is true beside distributed_type {config.get('distributed_type')}, which ignores it"
        yield Problem("use_cpu", message, "set use_cpu: false", (Edit("set", "use_cpu", False),))


@rule(
    "accelerate-number-as-text",
    "error",
    "accelerate",
    bad=GOOD.replace("num_processes: 4", 'num_processes: "4"'),
    good=GOOD,
    link="TypeError in accelerate 1.15.0",
)
def number_as_text(config: Document, context: Context) -> Iterator[Problem]:
    """A count in quotes is a text, with which the launcher cannot reckon."""
    for key in ("num_processes", "num_machines", "machine_rank", "main_process_port"):
        value = config.get(key)
        if isinstance(value, str) and value.strip().isdecimal() and key != "main_process_port":
            yield Problem(
                key, f"{key} is the text {value!r}", "write it without quotes", (Edit("set", key, int(value)),)
            )
        elif value is not None and not isinstance(value, int | str):
            yield Problem(key, f"{key} is {value!r}, not a number", "give a number")
