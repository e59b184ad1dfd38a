"""Rules over a machine, as the probe found it. What it does not hold is not known, and nothing is said of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

from scaletool.doctor.documents import ENVIRONMENT_KEY, Document
from scaletool.doctor.registry import Context, Problem, rule

GIB = 1 << 30
V100 = {"name": "Tesla V100-SXM2-32GB", "capability": [7, 0], "memory_gib": 31.7}
HEALTHY: dict[str, Any] = {
    ENVIRONMENT_KEY: 1,
    "python": "3.11.9",
    "variables": {"OMP_NUM_THREADS": "4"},
    "packages": {
        "torch": "2.13.0+cu126",
        "transformers": "5.24.0",
        "accelerate": "1.15.0",
        "deepspeed": "0.19.8",
        "datasets": "5.2.0",
    },
    "torch": {
        "version": "2.13.0+cu126",
        "cuda": "12.6",
        "arch_list": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
        "nccl": "2.29.3",
        "devices": [V100] * 4,
    },
    "driver": {
        "version": "580.95.05",
        "gpus": [{"name": "Tesla V100-SXM2-32GB", "used_mib": 4, "total_mib": 32768}] * 4,
    },
    "topology": {"NV2": 6},
    "cpus": 40,
    "shm": {"bytes": 64 * GIB, "free_bytes": 64 * GIB},
    "limits": {"nofile": [65536, 65536], "memlock": [None, None]},
    "hostname": {"name": "node1", "address": "10.0.0.11", "seconds": 0.0},
    "infiniband": ["mlx5_0"],
    "port_29500_free": True,
    "folders": {
        "working folder": {"path": "/data/t5", "free_bytes": 900 * GIB, "writable": True},
        "Hugging Face cache": {"path": "/data/hf", "free_bytes": 900 * GIB, "writable": True},
    },
    "hub_models": 3,
    "extension_locks": [],
    "tools": {"g++": "/usr/bin/g++", "ninja": "/usr/bin/ninja", "nvcc": "/usr/local/cuda/bin/nvcc"},
    "nvcc": "12.6",
}


def machine(**changed: Any) -> str:
    """The healthy machine with other values; section__key for one value of a section."""
    data = copy.deepcopy(HEALTHY)
    for name, value in changed.items():
        section, _, key = name.partition("__")
        if key:
            data[section][key] = value
        else:
            data[section] = value
    return json.dumps(data)


GOOD = machine()


# --- what the probe found, whatever its type


def text(found: Document, key: str) -> str:
    value = found.get(key)
    return value if isinstance(value, str) else ""


def count(found: Document, key: str) -> int | float | None:
    value = found.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def entries(found: Document, key: str) -> list[dict[str, Any]]:
    value = found.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def variables(found: Document) -> dict[str, str]:
    value = found.get("variables")
    return {str(name): str(each) for name, each in value.items()} if isinstance(value, dict) else {}


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cu126"."""
    return tuple(int(part) for part in re.findall(r"\d{1,6}", version.partition("+")[0])[:3])


def capability(device: dict[str, Any]) -> tuple[int, int] | None:
    value = device.get("capability")
    if isinstance(value, list) and len(value) == 2 and all(type(part) is int for part in value):
        return value[0], value[1]
    return None


def gpus(found: Document) -> int:
    """GPUs that are there, seen by torch or not."""
    return max(len(entries(found, "driver.gpus")), len(entries(found, "torch.devices")))


def architectures(found: Document) -> list[str]:
    value = found.get("torch.arch_list")
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def runs_on(architectures: list[str], wanted: tuple[int, int]) -> bool:
    """Whether a build has code for a compute capability, or code that the driver can translate."""
    for each in architectures:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", each)
        if parts:
            built = int(parts[2]), int(parts[3])
            if built <= wanted and (parts[1] == "compute" or built[0] == wanted[0]):
                return True
    return False


# --- versions, wheels, driver

# Only the CUDA 12.6 wheels have code for sm_70, and torch 2.14 is the last release that has such wheels
# (pytorch/pytorch#172352, pytorch/test-infra PR #8739). uv knows the index of each backend; pip needs its address.
INSTALL = {(7, 0): 'pip install uv && uv pip install "torch>=2.6,<2.15" --torch-backend=cu126'}
INSTALL_AUTO = "pip install uv && uv pip install torch --torch-backend=auto"


@rule(
    "environment-torch-without-gpu-code",
    "error",
    "environment",
    bad=machine(torch__arch_list=["sm_75", "sm_80", "sm_90"], torch__version="2.13.0+cu130", torch__cuda="13.0"),
    good=GOOD,
    link="pytorch/pytorch#172352",
)
def torch_without_gpu_code(found: Document, context: Context) -> Iterator[Problem]:
    """A torch build holds code for some GPUs only. The default wheels of 2.11 and later have none for V100 (sm_70):
    the first kernel ends with "no kernel image is available"."""
    built = architectures(found)
    devices = entries(found, "torch.devices")
    wanted = {each for each in map(capability, devices) if each}
    for each in sorted(wanted) if built else ():
        if not runs_on(built, each):
            message = (
                f"torch {text(found, 'torch.version')} has no code for sm_{each[0]}{each[1]}: only {', '.join(built)}"
            )
            yield Problem("torch.arch_list", message, INSTALL.get(each, INSTALL_AUTO))
    if built and not gpus(found) and not runs_on(built, context.gpu.capability):
        major, minor = context.gpu.capability
        message = f"torch {text(found, 'torch.version')} has no code for {context.gpu.name} (sm_{major}{minor})"
        yield Problem("torch.arch_list", message, INSTALL.get((major, minor), INSTALL_AUTO), severity="info")


@rule(
    "environment-torch-for-cpu",
    "error",
    "environment",
    bad=machine(torch__cuda=None, torch__arch_list=[], torch__devices=[], torch__version="2.13.0+cpu"),
    good=GOOD,
)
def torch_for_cpu(found: Document, context: Context) -> Iterator[Problem]:
    """With a CPU build of torch the GPUs are not used, and nothing says so."""
    if found.has("torch.cuda") and found.get("torch.cuda") is None and entries(found, "driver.gpus"):
        message = f"torch {text(found, 'torch.version')} is a CPU build, but there are {gpus(found)} GPUs"
        yield Problem("torch.version", message, INSTALL.get(context.gpu.capability, INSTALL_AUTO))


HIDDEN = ("", "-1", "NoDevFiles")


@rule(
    "environment-no-gpu-seen",
    "error",
    "environment",
    bad=machine(torch__devices=[], driver__version="470.57.02"),
    good=GOOD,
)
def no_gpu_seen(found: Document, context: Context) -> Iterator[Problem]:
    """CUDA builds of torch need a driver at least as new: 525 for CUDA 12, 580 for CUDA 13. Else they see no GPU."""
    there, seen = entries(found, "driver.gpus"), found.get("torch.devices")
    if not there or seen != [] or not text(found, "torch.cuda"):
        return
    if variables(found).get("CUDA_VISIBLE_DEVICES", "0") in HIDDEN:
        return
    cuda, driver = numbers(text(found, "torch.cuda")), numbers(text(found, "driver.version"))
    needed = {11: 450, 12: 525, 13: 580}.get(cuda[0] if cuda else 0)
    message = f"the driver knows {len(there)} GPUs, torch {text(found, 'torch.version')} sees none"
    if needed and driver and driver[0] < needed:
        message += f": driver {text(found, 'driver.version')} is older than {needed}, which CUDA {cuda[0]} needs"
        yield Problem("driver.version", message, "update the driver, or install a torch build for an older CUDA")
    else:
        yield Problem(
            "torch.devices", message, "look at CUDA_VISIBLE_DEVICES, the rights of /dev/nvidia*, the container"
        )


@rule(
    "environment-driver-without-volta",
    "error",
    "environment",
    bad=machine(driver={"version": "595.12", "gpus": [{"name": "Tesla V100-SXM2-32GB"}]}, torch__devices=[]),
    good=GOOD,
    link="NixOS/nixos-hardware#1880",
)
def driver_without_volta(found: Document, context: Context) -> Iterator[Problem]:
    """R580 is the last driver branch for Volta; later ones ignore a V100."""
    driver = numbers(text(found, "driver.version"))
    volta = any("V100" in str(each.get("name")) for each in entries(found, "driver.gpus"))
    if driver and driver[0] > 580 and (volta or (not gpus(found) and context.gpu.capability == (7, 0))):
        message = f"driver {text(found, 'driver.version')} no longer supports V100, 580 is the last branch that does"
        yield Problem("driver.version", message, "install a driver of the 580 branch")


SUPPORTED = {
    "torch": ((2, 6), (2, 15)),
    "transformers": ((5,), (6,)),
    "accelerate": ((1, 15), (2,)),
    "deepspeed": ((0, 19), (0, 20)),
    "datasets": ((4,), (6,)),
}


@rule(
    "environment-versions",
    "warning",
    "environment",
    bad=machine(packages__transformers="4.57.1"),
    good=GOOD,
)
def versions(found: Document, context: Context) -> Iterator[Problem]:
    """Keys, defaults and files of these libraries change between versions; others than these were not tried."""
    for name, (low, high) in SUPPORTED.items():
        installed = numbers(text(found, f"packages.{name}"))
        if installed and not low <= installed < high:
            wanted = f"{name}>={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
            message = f"{name} {text(found, f'packages.{name}')} is outside of {wanted}"
            yield Problem(f"packages.{name}", message, f'pip install "{wanted}"')


@rule(
    "environment-missing-library",
    "info",
    "environment",
    bad=machine(packages__accelerate=None),
    good=GOOD,
)
def missing_library(found: Document, context: Context) -> Iterator[Problem]:
    """A run needs all of them on every node. On a login node that only submits they may be missing."""
    for name in SUPPORTED:
        key = f"packages.{name}"
        if found.has(key) and found.get(key) is None:
            yield Problem(key, f"{name} is not installed", f"pip install {name}, in the environment of the run")


# --- GPUs


@rule(
    "environment-visible-devices",
    "error",
    "environment",
    bad=machine(variables={"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_JOB_ID": "12"}, torch__devices=[]),
    good=machine(variables={"CUDA_VISIBLE_DEVICES": "0,1,2,3"}),
    link="ray-project/ray#7014",
)
def visible_devices(found: Document, context: Context) -> Iterator[Problem]:
    """CUDA_VISIBLE_DEVICES decides which GPUs a process sees, whatever gpu_ids says. Slurm writes NoDevFiles where a
    job did not ask for GPUs; an id that is not there hides all after it."""
    value = variables(found).get("CUDA_VISIBLE_DEVICES")
    key, there = "variables.CUDA_VISIBLE_DEVICES", len(entries(found, "driver.gpus"))
    if value is None:
        return
    if value == "NoDevFiles":
        yield Problem(
            key, "CUDA_VISIBLE_DEVICES is NoDevFiles: the job asked for no GPUs", "ask for them: --gres=gpu:4"
        )
    elif value.strip() in HIDDEN and there:
        message = f"CUDA_VISIBLE_DEVICES={value!r} hides all {there} GPUs"
        yield Problem(key, message, "unset CUDA_VISIBLE_DEVICES", severity="warning")
    elif re.fullmatch(r"\d{1,3}(,\d{1,3})*", value.replace(" ", "")):
        ids = [int(part) for part in value.split(",")]
        if len(set(ids)) < len(ids):
            yield Problem(key, f"CUDA_VISIBLE_DEVICES={value} names a GPU twice: CUDA then sees none", "name each once")
        elif there and max(ids) >= there:
            message = f"CUDA_VISIBLE_DEVICES={value}, but the GPUs here are 0 to {there - 1}: those after it are hidden"
            yield Problem(key, message, f"name ids up to {there - 1}, or unset it")


@rule(
    "environment-gpus-differ",
    "warning",
    "environment",
    bad=machine(torch__devices=[V100, {"name": "NVIDIA A100-SXM4-40GB", "capability": [8, 0], "memory_gib": 39.4}]),
    good=GOOD,
)
def gpus_differ(found: Document, context: Context) -> Iterator[Problem]:
    """All processes wait for the slowest GPU at every step, and the smallest memory limits the batch."""
    names = sorted({str(each.get("name")) for each in entries(found, "torch.devices")})
    if len(names) > 1:
        message = f"the GPUs differ: {', '.join(names)}"
        yield Problem("torch.devices", message, "choose equal ones with CUDA_VISIBLE_DEVICES")


@rule(
    "environment-gpu-in-use",
    "warning",
    "environment",
    bad=machine(driver__gpus=[{"name": "Tesla V100-SXM2-32GB", "used_mib": 20480, "total_mib": 32768}] * 4),
    good=GOOD,
)
def gpu_in_use(found: Document, context: Context) -> Iterator[Problem]:
    """Memory that somebody else holds is missing for the batch, and two programs on one GPU slow each other down."""
    busy = []
    for index, each in enumerate(entries(found, "driver.gpus")):
        used, total = each.get("used_mib"), each.get("total_mib")
        if isinstance(used, int) and isinstance(total, int) and used > 0.1 * total > 0:
            busy.append(f"{index} ({used:,} of {total:,} MiB)")
    if busy:
        message = f"GPU memory is in use before anything was started: {', '.join(busy)}"
        yield Problem("driver.gpus", message, "look at nvidia-smi for programs left over, or choose other GPUs")


@rule(
    "environment-no-nvlink",
    "info",
    "environment",
    bad=machine(topology={"SYS": 4, "PIX": 2}),
    good=GOOD,
)
def no_nvlink(found: Document, context: Context) -> Iterator[Problem]:
    """Over NVLink a V100 exchanges about 120 GB/s, over PCIe about 10: scaling then depends on how often gradients
    are exchanged."""
    links = found.get("topology")
    if isinstance(links, dict) and links and not any(str(name).startswith("NV") for name in links):
        shown = ", ".join(f"{number} x {name}" for name, number in links.items())
        message = f"no two GPUs are linked by NVLink (pairs: {shown})"
        yield Problem("topology", message, "accumulate gradients, so that they are exchanged less often")


@rule(
    "environment-few-cpus",
    "warning",
    "environment",
    bad=machine(cpus=2),
    good=GOOD,
)
def few_cpus(found: Document, context: Context) -> Iterator[Problem]:
    """Each GPU has a process of its own, and its loader workers: with less than one core each, GPUs wait for data."""
    cpus, devices = count(found, "cpus"), len(entries(found, "torch.devices"))
    if cpus and devices > 1 and cpus < devices:
        message = f"{cpus} usable CPU cores for {devices} GPUs"
        yield Problem("cpus", message, "ask for more: --cpus-per-task, 4 or more for each GPU")


@rule(
    "environment-omp-threads",
    "warning",
    "environment",
    bad=machine(variables={"OMP_NUM_THREADS": "40"}),
    good=GOOD,
)
def omp_threads(found: Document, context: Context) -> Iterator[Problem]:
    """OMP_NUM_THREADS holds for each process: with one for each GPU they take each other's cores."""
    value, cpus = variables(found).get("OMP_NUM_THREADS"), count(found, "cpus")
    devices = len(entries(found, "torch.devices"))
    if value is not None and not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", value):
        message = f"OMP_NUM_THREADS={value!r} is not a number above 0 and is ignored"
        yield Problem("variables.OMP_NUM_THREADS", message, "write a number, or unset it")
    elif value is not None and value.isdecimal() and cpus and devices > 1 and int(value) * devices > cpus:
        message = f"OMP_NUM_THREADS={value} in each of {devices} processes, on {cpus} cores"
        yield Problem("variables.OMP_NUM_THREADS", message, f"export OMP_NUM_THREADS={max(int(cpus) // devices, 1)}")


# --- limits of the system


@rule(
    "environment-shm", "warning", "environment", bad=machine(shm={"bytes": 64 << 20, "free_bytes": 64 << 20}), good=GOOD
)
def shm(found: Document, context: Context) -> Iterator[Problem]:
    """Loader workers and NCCL hand over data through /dev/shm. Containers have 64 MiB by default: a bus error."""
    size, free = count(found, "shm.bytes"), count(found, "shm.free_bytes")
    if size is not None and size < GIB:
        message = f"/dev/shm has {size / 2**20:,.0f} MiB"
        yield Problem("shm.bytes", message, "start the container with --shm-size=8g or --ipc=host")
    elif free is not None and free < GIB / 4:
        message = f"/dev/shm has only {free / 2**20:,.0f} MiB left"
        yield Problem("shm.free_bytes", message, "delete what killed runs left there")


@rule("environment-open-files", "warning", "environment", bad=machine(limits={"nofile": [256, 4096]}), good=GOOD)
def open_files(found: Document, context: Context) -> Iterator[Problem]:
    """Every tensor that a loader worker hands over is an open file: "Too many open files" after a while."""
    limit = found.get("limits.nofile")
    soft = limit[0] if isinstance(limit, list) and limit and type(limit[0]) is int else None
    if soft is not None and soft <= 1024:
        hard = limit[1] if isinstance(limit, list) and len(limit) > 1 and type(limit[1]) is int else 65536
        message = f"at most {soft} files may be open at a time"
        fix = f"run: ulimit -n {min(hard, 65536)}"
        yield Problem("limits.nofile", message, fix, severity="info" if soft == 1024 else None)


@rule(
    "environment-memlock",
    "warning",
    "environment",
    bad=machine(limits__memlock=[65536, 65536]),
    good=GOOD,
)
def memlock(found: Document, context: Context) -> Iterator[Problem]:
    """InfiniBand needs locked memory: with a small limit NCCL fails, or falls back to slow sockets."""
    limit, ports = found.get("limits.memlock"), found.get("infiniband")
    soft = limit[0] if isinstance(limit, list) and limit and type(limit[0]) is int else None
    if soft is not None and soft < GIB and isinstance(ports, list) and ports and gpus(found):
        message = f"locked memory is limited to {soft / 2**20:,.1f} MiB, on a machine with InfiniBand"
        yield Problem("limits.memlock", message, "run: ulimit -l unlimited (a container: --ulimit memlock=-1)")


@rule(
    "environment-hostname",
    "warning",
    "environment",
    bad=machine(hostname={"name": "node1", "address": None, "seconds": 0.1}),
    good=GOOD,
    link="pytorch/pytorch#150532",
)
def hostname(found: Document, context: Context) -> Iterator[Problem]:
    """Processes meet by name. One that does not resolve is tried for two minutes without a word, then the start
    fails; one that is slow to resolve delays every start."""
    name, seconds = text(found, "hostname.name"), count(found, "hostname.seconds")
    address = found.get("hostname.address")
    several = variables(found).get("SLURM_NNODES", "1") not in ("", "1")
    if name and found.has("hostname.address") and address is None:
        message = f"the name of this machine, {name}, does not resolve"
        yield Problem("hostname.address", message, f"add it to /etc/hosts: 127.0.0.1 {name}")
    elif isinstance(address, str) and address.startswith("127.") and several:
        message = f"the name of this machine, {name}, is {address}: other nodes cannot reach it there"
        yield Problem(
            "hostname.address", message, "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network between them"
        )
    elif seconds is not None and seconds > 3:
        message = f"it took {seconds} s to resolve the name of this machine"
        yield Problem("hostname.seconds", message, f"add {name} to /etc/hosts")


@rule("environment-port", "warning", "environment", bad=machine(port_29500_free=False), good=GOOD)
def port(found: Document, context: Context) -> Iterator[Problem]:
    """accelerate and torchrun meet at port 29500 unless another one is named: what is there already is another run, or
    one left over, and a start over several nodes fails."""
    if found.get("port_29500_free") is False:
        message = "port 29500, the default of accelerate and torchrun, is taken"
        yield Problem("port_29500_free", message, "end the run that was left over, or give another main_process_port")


# --- folders


@rule(
    "environment-disk",
    "warning",
    "environment",
    bad=machine(folders={"working folder": {"path": "/data/t5", "free_bytes": 2 * GIB, "writable": True}}),
    good=GOOD,
)
def disk(found: Document, context: Context) -> Iterator[Problem]:
    """A checkpoint of T5-base with its optimizer takes 2.7 GB, and the libraries' caches grow with the data. A full
    disk ends the run while it saves."""
    for name, folder in _folders(found):
        free, path = folder.get("free_bytes"), folder.get("path")
        if isinstance(free, int) and name in ("working folder", "Hugging Face cache") and free < 5 * GIB:
            message = f"{free / GIB:.1f} GiB are free for the {name} ({path})"
            yield Problem(f"folders.{name}", message, "make room, or use another disk (HF_HOME for the cache)")


@rule(
    "environment-folder-not-writable",
    "error",
    "environment",
    bad=machine(folders={"Hugging Face cache": {"path": "/data/hf", "free_bytes": 900 * GIB, "writable": False}}),
    good=GOOD,
)
def folder_not_writable(found: Document, context: Context) -> Iterator[Problem]:
    """What is downloaded, tokenised or compiled has to be written somewhere."""
    variable = {
        "Hugging Face cache": "HF_HOME",
        "folder of compiled operators": "TORCH_EXTENSIONS_DIR",
        "temporary folder": "TMPDIR",
    }
    for name, folder in _folders(found):
        if folder.get("writable") is False and name in variable:
            message = f"the {name} ({folder.get('path')}) cannot be written"
            yield Problem(f"folders.{name}", message, f"export {variable[name]}=a folder of yours")


def _folders(found: Document) -> list[tuple[str, dict[str, Any]]]:
    value = found.get("folders")
    return (
        [(str(name), each) for name, each in value.items() if isinstance(each, dict)] if isinstance(value, dict) else []
    )


LOCK = {"path": "/home/me/.cache/torch_extensions/py311_cu126/fused_adam/lock", "minutes": 90, "in_use": False}


@rule(
    "environment-stale-lock",
    "error",
    "environment",
    bad=machine(extension_locks=[LOCK]),
    good=machine(extension_locks=[{**LOCK, "minutes": 1, "in_use": True}]),
)
def stale_lock(found: Document, context: Context) -> Iterator[Problem]:
    """A build of a DeepSpeed operator that was killed leaves its lock, and every later run waits for it, silently and
    for ever."""
    for each in entries(found, "extension_locks"):
        minutes = each.get("minutes")
        if isinstance(minutes, int | float) and minutes >= 5 and each.get("in_use") is not True:
            known = each.get("in_use") is False
            message = f"a lock of {minutes:,} minutes ago{', held by no process' if known else ''}: {each.get('path')}"
            yield Problem("extension_locks", message, f"rm {each.get('path')}", severity=None if known else "warning")


@rule(
    "environment-compiler",
    "warning",
    "environment",
    bad=machine(tools={"g++": None, "ninja": "/usr/bin/ninja", "nvcc": "/usr/local/cuda/bin/nvcc"}),
    good=GOOD,
)
def compiler(found: Document, context: Context) -> Iterator[Problem]:
    """DeepSpeed compiles its optimizers on first use. That needs g++, ninja, and an nvcc of the CUDA version that torch
    was built with."""
    if not gpus(found) or not text(found, "packages.deepspeed") or not text(found, "torch.cuda"):
        return
    tools = found.get("tools")
    missing = [name for name, path in tools.items() if path is None] if isinstance(tools, dict) else []
    if missing:
        message = f"{', '.join(map(str, missing))} is missing: DeepSpeed cannot compile FusedAdam or CPUAdam"
        yield Problem("tools", message, "install it, or load the modules of the compiler and of CUDA")
    nvcc, cuda = numbers(text(found, "nvcc"))[:1], numbers(text(found, "torch.cuda"))[:1]
    if nvcc and cuda and nvcc != cuda:
        message = (
            f"nvcc is of CUDA {text(found, 'nvcc')}, torch of {text(found, 'torch.cuda')}: DeepSpeed refuses to compile"
        )
        yield Problem("nvcc", message, f"load CUDA {text(found, 'torch.cuda')}, or set CUDA_HOME to it")


# --- what overrides files


def _left(values: dict[str, Any]) -> str:
    return machine(
        default_config={"path": "/home/me/.cache/huggingface/accelerate/default_config.yaml", "values": values}
    )


@rule(
    "environment-default-config",
    "info",
    "environment",
    bad=_left({"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp16"}),
    good=GOOD,
)
def default_config(found: Document, context: Context) -> Iterator[Problem]:
    """`accelerate launch` without --config_file takes this file, whatever it was written for."""
    values, path = found.get("default_config.values"), text(found, "default_config.path")
    if not path or not isinstance(values, dict):
        return
    names = ("distributed_type", "num_processes", "num_machines", "mixed_precision", "gpu_ids", "debug")
    shown = ", ".join(f"{name}: {values[name]}" for name in names if name in values)
    message = f"a launch without --config_file uses {path} ({shown})"
    harmful = values.get("debug") is True or (values.get("mixed_precision") == "bf16" and not context.gpu.has_bf16)
    processes, devices = values.get("num_processes"), len(entries(found, "torch.devices"))
    harmful = harmful or (
        type(processes) is int and 0 < devices < processes and values.get("num_machines") in (None, 1)
    )
    fix = "name a config at every launch, or delete the file"
    yield Problem("default_config.path", message, fix, severity="warning" if harmful else None)


OVERRIDING = {
    "ACCELERATE_MIXED_PRECISION": "the precision of the script",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "the accumulation steps of the script, or multiplies them under Trainer",
    "ACCELERATE_USE_FSDP": "the engine",
    "ACCELERATE_USE_DEEPSPEED": "the engine",
    "ACCELERATE_USE_MEGATRON_LM": "the engine",
    "ACCELERATE_DYNAMO_BACKEND": "whether the model is compiled",
    "ACCELERATE_TORCH_DEVICE": "the device",
    "ACCELERATE_CONFIG_DS_FIELDS": "which DeepSpeed values are checked",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "the ZeRO stage",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "the DeepSpeed file",
    "ACCELERATE_GRADIENT_CLIPPING": "the clipping of the script",
}


@rule(
    "environment-overriding-variable",
    "warning",
    "environment",
    bad=machine(variables={"ACCELERATE_MIXED_PRECISION": "bf16"}),
    good=GOOD,
)
def overriding_variable(found: Document, context: Context) -> Iterator[Problem]:
    """accelerate lets its variables win over what a script says. Left in a shell profile they change every run."""
    given = variables(found)
    if "TORCHELASTIC_RUN_ID" in given:  # inside of a launch, which sets them
        return
    for name, what in OVERRIDING.items():
        value = given.get(name)
        if value is not None and value.lower() not in ("", "no", "false", "0"):
            yield Problem(f"variables.{name}", f"{name}={value} overrides {what}", f"unset {name}")
    if given.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") and gpus(found):
        message = f"ACCELERATE_USE_CPU={given['ACCELERATE_USE_CPU']}: the {gpus(found)} GPUs are not used"
        yield Problem("variables.ACCELERATE_USE_CPU", message, "unset ACCELERATE_USE_CPU")


@rule(
    "environment-leftover-rank",
    "error",
    "environment",
    bad=machine(variables={"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}),
    good=machine(variables={"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}),
)
def leftover_rank(found: Document, context: Context) -> Iterator[Problem]:
    """A script started without a launcher takes these for its own, and waits for processes that nobody starts."""
    given = variables(found)
    if "TORCHELASTIC_RUN_ID" in given or "SLURM_STEP_ID" in given:
        return
    world = given.get("WORLD_SIZE", "")
    ranks = [f"{name}={given[name]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in given]
    if world.isdecimal() and int(world) > 1 and len(ranks) > 1:
        message = f"{', '.join(ranks)} are set outside of a launch: a script waits for {int(world) - 1} others"
        yield Problem("variables.WORLD_SIZE", message, "unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT")
    elif given.get("LOCAL_RANK", "0") not in ("0", "-1", "") or given.get("RANK", "0") not in ("0", "-1", ""):
        message = f"{', '.join(ranks)} is set outside of a launch: it is no main process, and saves and logs nothing"
        yield Problem("variables.RANK", message, "unset RANK LOCAL_RANK", severity="warning")


@rule(
    "environment-master-port",
    "info",
    "environment",
    bad=machine(variables={"MASTER_PORT": "29500"}),
    good=GOOD,
)
def master_port(found: Document, context: Context) -> Iterator[Problem]:
    """With one port for all runs of a shell, the second on this machine ends with EADDRINUSE."""
    given = variables(found)
    running = {"TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "WORLD_SIZE"} & set(given)
    if given.get("MASTER_PORT") and not running and "SLURM_JOB_ID" not in given:
        message = f"MASTER_PORT={given['MASTER_PORT']} is set for all runs of this shell"
        yield Problem("variables.MASTER_PORT", message, "unset MASTER_PORT, and name a port at the launch")


SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "ACCELERATE_DEBUG_MODE": ("1", "true"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_SHM_DISABLE": ("1",),
    "NCCL_IB_DISABLE": ("1",),
}
WHY_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every kernel",
    "ACCELERATE_DEBUG_MODE": "shapes are exchanged before every collective operation",
    "TORCH_DISTRIBUTED_DEBUG": "every collective operation is checked on all ranks first",
    "NCCL_P2P_DISABLE": "GPUs exchange through main memory instead of NVLink",
    "NCCL_SHM_DISABLE": "processes on one machine exchange over sockets",
    "NCCL_IB_DISABLE": "nodes exchange over sockets instead of InfiniBand",
}


@rule(
    "environment-slow-variable",
    "warning",
    "environment",
    bad=machine(variables={"NCCL_P2P_DISABLE": "1"}),
    good=GOOD,
)
def slow_variable(found: Document, context: Context) -> Iterator[Problem]:
    """Set once to find a fault, and left in a profile, they slow every run down."""
    given, several = variables(found), gpus(found) > 1
    for name, values in SLOW.items():
        if given.get(name, "").lower() not in [value.lower() for value in values]:
            continue
        if (name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") and not several) or (
            name == "NCCL_IB_DISABLE" and not found.get("infiniband")
        ):
            continue
        yield Problem(f"variables.{name}", f"{name}={given[name]}: {WHY_SLOW[name]}", f"unset {name}")


@rule(
    "environment-socket-interface",
    "error",
    "environment",
    bad=machine(variables={"NCCL_SOCKET_IFNAME": "lo", "SLURM_NNODES": "2"}),
    good=machine(variables={"NCCL_SOCKET_IFNAME": "lo"}),
)
def socket_interface(found: Document, context: Context) -> Iterator[Problem]:
    """The loopback interface reaches this machine only: several nodes never find each other over it."""
    given = variables(found)
    nodes = given.get("SLURM_NNODES", "1")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if given.get(name, "").lstrip("=") == "lo" and nodes.isdecimal() and int(nodes) > 1:
            message = f"{name}=lo in a job of {nodes} nodes: they cannot reach each other"
            yield Problem(f"variables.{name}", message, f"unset {name}, or name the network between the nodes")


@rule(
    "environment-offline",
    "warning",
    "environment",
    bad=machine(variables={"HF_HUB_OFFLINE": "1"}, hub_models=0),
    good=machine(variables={"HF_HUB_OFFLINE": "1"}),
)
def offline(found: Document, context: Context) -> Iterator[Problem]:
    """Offline, models and tokenizers come from the cache only; where it is empty the start fails."""
    name = next(
        (each for each in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(variables(found).get(each))), None
    )
    if name and found.get("hub_models") == 0:
        message = f"{name} is set, but there is no model in the Hugging Face cache"
        yield Problem(f"variables.{name}", message, f"unset {name}, download once, or name a local folder")


def _is_on(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on")
