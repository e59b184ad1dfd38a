"""For all tests: nothing is written to the user's home, nothing is downloaded, no variable of the outside leaks in."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

FOLDERS = ("unit", "shipped", "cpu", "dist", "gpu")
"""Folders of tests, in the order they run in: what fails fast comes first. Each is a marker, too."""

_CLEARED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "SLURM_", "TORCHELASTIC_")
_CLEARED_EXACTLY = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR")

_home: Path | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test file, and so any library, is imported; child processes inherit it."""
    global _home
    _home = Path(tempfile.mkdtemp(prefix="scaletool-tests-"))
    for name in list(os.environ):
        if name.startswith(_CLEARED) or name in _CLEARED_EXACTLY:
            del os.environ[name]
    os.environ.update(
        XDG_CACHE_HOME=str(_home / "cache"),
        XDG_CONFIG_HOME=str(_home / "config"),
        HF_HOME=str(_home / "cache" / "huggingface"),
        MPLCONFIGDIR=str(_home / "config" / "matplotlib"),
        TRITON_CACHE_DIR=str(_home / "cache" / "triton"),
        TORCH_EXTENSIONS_DIR=str(_home / "cache" / "torch_extensions"),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS="1",
        COLUMNS="120",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    if _home is not None:
        shutil.rmtree(_home, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its folder and run the quick folders first."""
    tests = Path(__file__).parent

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""

    for item in items:
        if folder(item) in FOLDERS:
            item.add_marker(folder(item))
    items.sort(key=lambda item: FOLDERS.index(folder(item)) if folder(item) in FOLDERS else len(FOLDERS))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The top of the checkout, where accelerate_configs/ lies."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """XDG_CACHE_HOME of this session and its child processes: shared by all tests, gone at the end."""
    return Path(os.environ["XDG_CACHE_HOME"])
