"""One real run in one process, from the config file to the saved model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer, T5ForConditionalGeneration

from scaletool.config import RunConfig, load_config
from scaletool.record import CPU_STAMP
from scaletool.train.data.batches import ShardSampler, make_loader
from scaletool.train.data.order import GlobalOrder
from scaletool.train.data.tokenise import load_data
from scaletool.train.data.tokenizer import load_tokenizer
from scaletool.train.loss import compute_loss_in_forward, loss_sum

STEPS, EVERY = 5, 2
Finished = tuple[RunConfig, Path, dict[str, Any], str]
"""(config, output folder, record, log)"""


def launch(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scaletool.train", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    repository = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(repository), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def finished(write_rows: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run with a validation share."""
    folder = tmp_path_factory.mktemp("run")
    write_rows(folder / "rows.jsonl")
    sections = {
        "data": {
            "train": "rows.jsonl",
            "validation": 0.1,
            "per_device_batch_size": 4,
            "cache_dir": str(folder / "cache"),
        },
        "train": {
            "max_steps": STEPS,
            "gradient_accumulation_steps": 2,
            "eval_every": EVERY,
            "learning_rate": 0.01,
            "output_dir": "out",
        },
        "measure": {"record_samples": True},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    done = launch("run.yaml", folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads((folder / "out" / "record.json").read_text())
    config = load_config(folder / "run.yaml", [f"data.train={folder / 'rows.jsonl'}"]).run
    return config, folder / "out", record, done.stderr


def test_record(finished: Finished) -> None:
    _, _, record, log = finished
    assert (record["outcome"], record["exit_status"], record["stamp"]) == ("ok", 0, CPU_STAMP)
    assert record["observed"] == record["requested"]
    assert record["observed"]["engine"] == "single"
    assert record["plan"]["rows"] == 54
    assert record["plan"]["optimizer_steps"] == len(record["steps"]) == STEPS
    assert record["steps"][-1]["loss"] < record["steps"][0]["loss"]
    assert record["window"]["samples"] == sum(step["samples"] for step in record["steps"]) == STEPS * 8
    assert "54 rows = 14 batches per rank = 7 optimizer steps per epoch" in log
    assert CPU_STAMP in log


def test_validation_at_every_second_step_and_at_the_end(
    finished: Finished,
) -> None:
    _, _, record, _ = finished
    assert [each["step"] for each in record["validation"]] == [2, 4, 5]
    assert record["validation"][-1]["loss"] < record["validation"][0]["loss"]


def test_samples_leave_the_held_out_rows_alone(finished: Finished) -> None:
    config, out, _, _ = finished
    lines = [json.loads(line) for line in (out / "samples.rank0.jsonl").read_text().splitlines()]
    used = [row for line in lines for row in line["rows"]]
    assert len(lines) == STEPS * 2
    assert len(used) == len(set(used)) == STEPS * 8
    cache = Path(str(config.data.cache_dir))
    held_out = load_data(config, cache, load_tokenizer(config, cache))[1]
    assert held_out is not None
    assert not set(used) & set(held_out.numbers.tolist())


@torch.no_grad()
def test_saved_model_has_the_loss_of_the_last_validation(
    finished: Finished,
) -> None:
    config, out, record, _ = finished
    model = T5ForConditionalGeneration.from_pretrained(out / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    held_out = load_data(config, Path(str(config.data.cache_dir)), tokenizer)[1]
    assert held_out is not None
    order = GlobalOrder(len(held_out), len(held_out), shuffle=False)
    sampler = ShardSampler(
        order, held_out.target_lengths, rank=0, world_size=1, per_device_batch_size=len(held_out), steps=range(1)
    )
    (batch,) = make_loader(held_out, sampler, tokenizer.pad_token_id)
    compute_loss_in_forward(model)
    tokens = batch["info"].target_tokens
    assert float(loss_sum(model, batch)) / tokens == pytest.approx(record["validation"][-1]["loss"], rel=1e-5)
    assert model.config.use_cache is True


def test_config_that_no_run_can_use_ends_before_anything_is_loaded(tmp_path: Path) -> None:
    done = launch("--set", "train.learning_rate=0", "--set", "data.source=none", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: train.learning_rate is 0.0")
    assert "data.source is 'none'" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
