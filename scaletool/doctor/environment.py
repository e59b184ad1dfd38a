"""What this machine is: versions, wheels, GPUs, driver, links, limits, ports, caches, and variables left over.

Nothing is changed and no training library is imported: torch is asked in a process of its own. What does not answer
in time is left out, and the rules say nothing about what is left out.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scaletool.doctor.documents import ENVIRONMENT_KEY, Document, read

LONGEST, LONGEST_CHILD = 9.0, 8.0
"""Seconds for everything, and for each program that is asked."""
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets")
WATCHED = re.compile(
    r"(ACCELERATE|FSDP|NCCL|TORCH_NCCL|GLOO|PET|TORCHELASTIC)_\w+"
    r"|SLURM_(JOB_ID|NNODES|NTASKS|PROCID|NODEID|GPUS_ON_NODE|STEP_ID)"
    r"|(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|HOME)"
    r"|OMP_NUM_THREADS|HF_(HOME|HUB_OFFLINE|HUB_CACHE|DATASETS_OFFLINE)|TRANSFORMERS_OFFLINE|TORCH_EXTENSIONS_DIR"
    r"|TORCH_DISTRIBUTED_DEBUG|PYTORCH_(CUDA_)?ALLOC_CONF|TOKENIZERS_PARALLELISM|XDG_CACHE_HOME"
)
SECRET = re.compile("TOKEN|SECRET|PASSWORD|KEY", re.IGNORECASE)

ASK_TORCH = """
import json, warnings
warnings.simplefilter("ignore")
import torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "arch_list": torch.cuda.get_arch_list()}
found["devices"] = []
if torch.cuda.is_available():
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for index in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(index)
        memory = round(each.total_memory / 2**30, 1)
        found["devices"].append({"name": each.name, "capability": [each.major, each.minor], "memory_gib": memory})
print(json.dumps(found))
"""


def probe(environment: Mapping[str, str]) -> Document:
    """This machine, in less than ten seconds. environment: its variables."""
    caches = Caches(environment)
    asked: dict[str, Callable[[], Any]] = {
        "torch": _torch,
        "driver": _driver,
        "topology": _topology,
        "packages": lambda: {name: _version(name) for name in PACKAGES},
        "cpus": _cpus,
        "shm": lambda: _space(Path("/dev/shm")),
        "limits": _limits,
        "hostname": _hostname,
        "infiniband": lambda: _names(Path("/sys/class/infiniband")),
        "port_29500_free": lambda: _is_free(29500),
        "folders": lambda: {name: _folder(path) for name, path in caches.folders.items()},
        "hub_models": lambda: len([name for name in _names(caches.hub) if name.startswith("models--")]),
        "extension_locks": lambda: _locks(caches.extensions),
        "default_config": lambda: _default_config(caches.accelerate),
        "tools": lambda: {name: shutil.which(name) for name in ("g++", "ninja", "nvcc")},
        "nvcc": _nvcc,
    }
    data: dict[str, Any] = {
        ENVIRONMENT_KEY: 1,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "variables": {
            name: value
            for name, value in sorted(environment.items())
            if WATCHED.fullmatch(name) and not SECRET.search(name)
        },
    }
    data.update(_answers(asked))
    return Document("this machine", "environment", json.dumps(data, indent=1, default=str), data)


class Caches:
    """Where libraries keep what they download and build."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        cache = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache")
        home = Path(environment.get("HF_HOME") or cache / "huggingface").expanduser()
        self.accelerate = home / "accelerate"
        self.hub = Path(environment.get("HF_HUB_CACHE") or home / "hub").expanduser()
        self.extensions = Path(environment.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions").expanduser()
        self.folders = {
            "working folder": Path.cwd(),
            "Hugging Face cache": home,
            "folder of compiled operators": self.extensions,
            "temporary folder": Path(environment.get("TMPDIR") or "/tmp"),
        }


def _answers(asked: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What answers in time; a hanging file system or name server keeps the others from nothing."""
    answers: dict[str, Any] = {}

    def ask(name: str, question: Callable[[], Any]) -> None:
        try:
            answer = question()
        except (OSError, ValueError, LookupError, subprocess.SubprocessError):
            return
        if answer is not None:
            answers[name] = answer

    threads = [threading.Thread(target=ask, args=each, daemon=True) for each in asked.items()]
    end = time.monotonic() + LONGEST
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return {name: answers[name] for name in asked if name in answers}


def _output(*command: str) -> str:
    """What a program prints. Raises where it is missing, fails or takes too long."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LONGEST_CHILD, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch() -> dict[str, Any] | None:
    if _version("torch") is None:
        return None
    found: dict[str, Any] = json.loads(_output(sys.executable, "-c", ASK_TORCH).splitlines()[-1])
    return found


def _driver() -> dict[str, Any] | None:
    """Version and GPUs, as nvidia-smi knows them: all of the machine, whatever CUDA_VISIBLE_DEVICES says."""
    if shutil.which("nvidia-smi") is None:
        return None
    fields = "driver_version,name,memory.used,memory.total"
    lines = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").strip().splitlines()
    rows = [[part.strip() for part in line.split(",")] for line in lines]
    gpus = [
        {"name": row[1], "used_mib": _number(row[2]), "total_mib": _number(row[3])} for row in rows if len(row) == 4
    ]
    return {"version": rows[0][0] if gpus else None, "gpus": gpus}


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _topology() -> dict[str, int] | None:
    """How many pairs of GPUs are linked in which way: {"NV2": 6}."""
    return None if shutil.which("nvidia-smi") is None else links(_output("nvidia-smi", "topo", "-m"))


def links(matrix: str) -> dict[str, int]:
    """Pairs by kind of link, of the matrix that nvidia-smi prints."""
    pairs: dict[str, int] = {}
    matrix = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [line.split() for line in matrix.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # the head has none
    for number, row in enumerate(rows):
        for link in row[number + 2 : len(rows) + 1]:
            pairs[link] = pairs.get(link, 0) + 1
    return pairs


def _nvcc() -> str | None:
    """Its CUDA version."""
    if shutil.which("nvcc") is None:
        return None
    found = re.search(r"release (\d+\.\d+)", _output("nvcc", "--version"))
    return found[1] if found else None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _space(path: Path) -> dict[str, int] | None:
    if not path.is_dir():
        return None
    usage = shutil.disk_usage(path)
    return {"bytes": usage.total, "free_bytes": usage.free}


def _limits() -> dict[str, list[int | None]]:
    """Soft and hard; None: unlimited."""
    names = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    return {
        name: [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(limit)]
        for name, limit in names.items()
    }


def _hostname() -> dict[str, Any]:
    name, start = socket.gethostname(), time.monotonic()
    try:
        address: str | None = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        address = None
    return {"name": name, "address": address, "seconds": round(time.monotonic() - start, 1)}


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe_socket:
        probe_socket.settimeout(1)
        return probe_socket.connect_ex(("127.0.0.1", port)) != 0


def _folder(path: Path) -> dict[str, Any]:
    """Of the folder, or of the nearest one above it that is there."""
    there = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    return {"path": str(path), "free_bytes": shutil.disk_usage(there).free, "writable": os.access(there, os.W_OK)}


def _locks(folder: Path) -> list[dict[str, Any]]:
    """Locks of builds: how old each is, and whether a process still has it open (None: cannot be known)."""
    paths = [path for pattern in ("*/lock", "*/*/lock") for path in folder.glob(pattern)]
    opened = _open_files() if paths else set()
    return [
        {
            "path": str(path),
            "minutes": round((time.time() - path.stat().st_mtime) / 60),
            "in_use": str(path.resolve()) in opened if Path("/proc/self/fd").is_dir() else None,
        }
        for path in paths
    ]


def _open_files() -> set[str]:
    """Of all processes that this user may look at."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


def _default_config(folder: Path) -> dict[str, Any] | None:
    """The config that `accelerate launch` takes where none is named."""
    for path in (folder / "default_config.yaml", folder / "default_config.yml", folder / "default_config.json"):
        if path.is_file():
            values = read(str(path)).data
            return {"path": str(path), "values": json.loads(json.dumps(values, default=str))}
    return None
