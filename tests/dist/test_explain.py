"""What --explain says of contradictory sources is what a real run of them observes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from launching import REPOSITORY, free_port, run

from scaletool.doctor.documents import read
from scaletool.doctor.explain import explain

COMPARED = (
    "mode",
    "world_size",
    "precision",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
)

RUN = """\
data: {{train: [{rows}], per_device_batch_size: 2}}
train: {{mode: {mode}, max_steps: 2, precision: {precision}, gradient_accumulation_steps: 2, max_grad_norm: 0.5}}
"""


@pytest.mark.parametrize(
    ("profile", "changes", "precision", "variables"),
    [
        ("ddp", {"mixed_precision: fp16": "mixed_precision: bf16"}, "fp32", {}),
        ("ddp", {"mixed_precision: fp16": "mixed_precision: 'no'"}, "fp32", {"ACCUMULATION": "3"}),
        ("zero2", {}, "fp32", {"ACCUMULATION": "3"}),
    ],
)
@pytest.mark.parametrize("mode", ["custom", "trainer"])
def test_explained_is_observed(
    profile: str, changes: dict[str, str], precision: str, variables: dict[str, str], mode: str, tmp_path: Path,
    rows_file: Path,
) -> None:  # fmt: skip
    text = (REPOSITORY / "accelerate_configs" / f"{profile}.yaml").read_text(encoding="utf-8")
    for old, new in {"num_processes: 8": "num_processes: 2", **changes}.items():
        assert old in text
        text = text.replace(old, new)
    text = text.replace("ds_configs/", f"{REPOSITORY / 'ds_configs'}/")
    config, run_file = tmp_path / "accelerate.yaml", tmp_path / "run.yaml"
    config.write_text(text, encoding="utf-8")
    run_file.write_text(RUN.format(rows=rows_file, mode=mode, precision=precision), encoding="utf-8")
    environment = {f"ACCELERATE_GRADIENT_{name}_STEPS": value for name, value in variables.items()}

    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--main_process_port", str(free_port()), "-m", "scaletool.train", str(run_file)]
    done = run(launcher, out=tmp_path / "out", environment=environment, ok=False)

    settings = {each.name: each for each in explain([read(str(config)), read(str(run_file))], environment)}
    observed: dict[str, Any] = done.record["observed"]
    assert {name: settings[name].value for name in COMPARED} == {name: observed[name] for name in COMPARED}
    losers = [name for name in COMPARED if settings[name].lost]
    assert bool(losers) == (done.record["outcome"] == "invalid")  # and nothing contradictory runs
