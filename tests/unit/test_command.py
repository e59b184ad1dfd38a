"""What the driver takes from the machine and hands to the worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scaletool.config import RunConfig, load_config
from scaletool.sweep.command import Machine, cell_config, launch_line, probe_machine
from scaletool.sweep.matrix import make_cells

TWO_GPUS = """#!/bin/sh
echo "GPU 0: Tesla V100-SXM2-32GB (UUID: GPU-aaaa)"
echo "  MIG 1g.5gb Device 0: (UUID: MIG-cccc)"
echo "GPU 1: Tesla V100-SXM2-16GB (UUID: GPU-bbbb)"
"""


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["aaaa", "bbbb"]),
        ("", []),
        ("-1", []),
        ("1", ["bbbb"]),
        ("1,0", ["bbbb", "aaaa"]),
        ("0,-1,1", ["aaaa"]),  # CUDA, too, ends at the first entry that names no device
        ("0,2", ["aaaa"]),
        ("GPU-bbbb", ["bbbb"]),
        ("MIG-cccc", ["MIG-cccc"]),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(
    visible: str | None, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(TWO_GPUS)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = probe_machine().gpu_names
    assert len(names) == len(found)
    assert all(word in name for word, name in zip(found, names, strict=True))


def test_run_json_loads_back_and_holds_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = RunConfig().replace(measure__steps=4, measure__warmup_steps=2, train__max_steps=999)
    (cell,) = make_cells([2], ["zero2"], ["trainer"], ["weak"], config)
    (tmp_path / "run.json").write_text(json.dumps(cell_config(cell, config, tmp_path, measured=True).to_dict()))
    run = load_config(tmp_path / "run.json").run
    assert run.train.mode == "trainer"
    assert run.train.max_steps == 6
    assert run.train.output_dir == str(tmp_path.resolve())
    assert (run.launch.profile, run.launch.engine, run.launch.world_size) == ("zero2", "zero2", 2)
    assert (run.launch.scaling, run.launch.measured) == ("weak", True)
    assert run.launch.environment == {"ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.mark.parametrize(("gpus", "threads"), [((), "1"), (("V100",), None)])
def test_threads_are_held_on_machines_without_gpus(gpus: tuple[str, ...], threads: str | None, tmp_path: Path) -> None:
    (cell,) = make_cells([1], ["ddp"], ["custom"], ["weak"], RunConfig())
    line = launch_line(cell, RunConfig(), tmp_path / "run.json", Machine(gpus, 2), launch_id="x")
    assert line.environment.get("OMP_NUM_THREADS") == threads
    assert line.arguments[-3:] == ("-m", "scaletool.train", str(tmp_path / "run.json"))
