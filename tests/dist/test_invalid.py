"""A run that is not the one asked for is invalid, never silently different."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import accelerate_launch, python, torchrun

SHORT = ["--set", "train.max_steps=2"]


@pytest.mark.parametrize("mode", ["custom", "trainer"])
@pytest.mark.parametrize(
    ("variable", "value"), [("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"), ("ACCELERATE_MIXED_PRECISION", "bf16")]
)
def test_wrong_environment_variable_alone(
    variable: str, value: str, mode: str, tmp_path: Path, rows_file: Path
) -> None:
    data = ["--set", f"data.train={rows_file}"]
    done = python("--mode", mode, *SHORT, *data, out=tmp_path, environment={variable: value}, ok=False)
    assert done.status == 3
    assert done.record["outcome"] == "invalid"
    assert f"{variable}={value}" in done.record["reason"]


@pytest.mark.parametrize("profile", ["ddp", "zero2"])
def test_accumulation_variable_under_the_launcher(profile: str, tmp_path: Path, rows_file: Path) -> None:
    variable = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    data = ["--set", f"data.train={rows_file}"]
    done = accelerate_launch(profile, 2, *SHORT, *data, out=tmp_path, environment=variable, ok=False)
    assert done.status != 0
    assert done.record["outcome"] == "invalid"


def test_engine_and_world_of_the_driver_are_checked(tmp_path: Path, rows_file: Path) -> None:
    asked = ["launch.engine=zero2", "launch.world_size=4", f"data.train={rows_file}"]
    done = torchrun(2, *SHORT, *(part for key in asked for part in ("--set", key)), out=tmp_path, ok=False)
    assert done.record["outcome"] == "invalid"
    assert "world_size: asked for 4, observed 2" in done.record["reason"]
    assert "engine: asked for zero2, observed ddp" in done.record["reason"]


def test_fewer_rows_than_processes(tmp_path: Path) -> None:
    data = tmp_path / "one.jsonl"
    data.write_text('{"source": "a", "target": "b"}\n')
    done = torchrun(2, *SHORT, "--set", f"data.train={data}", out=tmp_path / "out", ok=False)
    assert done.status != 0
    assert "fewer than 2 processes" in done.record["reason"]
    assert done.record["exit_status"] == 2
