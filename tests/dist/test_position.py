"""A run killed in the middle of an epoch: from its last step on, the loader goes on with the right samples, on another
world size too, without reading what was consumed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import REPOSITORY, samples

from scaletool.config import RunConfig, load_config
from scaletool.train.data.shards import load_shards
from scaletool.train.data.tokenizer import load_tokenizer

FORMS = {
    "padded": {"data.batching": "padded"},
    "bucketed": {"data.batching": "bucketed"},
    "packed": {"data.batching": "packed"},
    "stream": {"data.streaming": "true", "data.num_workers": "1"},
}
ENOUGH_STEPS = 4
TIME_LIMIT_SECONDS = 120


def loaded_rows(config: RunConfig, world_size: int, start_step: int) -> dict[int, list[int]]:
    """step -> rows of its global batch, from a loader that begins at `start_step`."""
    cache = Path(str(config.data.cache_dir))
    tokenizer = load_tokenizer(config, cache)
    batch = config.data.per_device_batch_size // world_size
    config = config.replace(data__per_device_batch_size=batch, data__num_workers=0)
    steps: dict[int, list[int]] = {}
    for rank in range(world_size):
        shards = load_shards(config, cache, tokenizer, rank=rank, world_size=world_size, start_step=start_step)
        for item in itertools.islice(shards.loader, 2 * ENOUGH_STEPS):
            steps.setdefault(item["info"].micro.step, []).extend(item["info"].rows)
    return {step: sorted(rows) for step, rows in steps.items()}


@pytest.mark.parametrize("form", FORMS)
def test_killed_in_the_middle_of_an_epoch(form: str, rows_file: Path, tmp_path: Path) -> None:
    settings = {
        **FORMS[form],
        "data.train": str(rows_file),
        "data.per_device_batch_size": "4",
        "data.cache_dir": str(tmp_path / "cache"),
        "train.epochs": "1000",
        "train.log_every": "1",
        "train.output_dir": str(tmp_path / "out"),
        "measure.record_samples": "true",
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    words = [word for override in overrides for word in ("--set", override)]
    process = subprocess.Popen(
        [sys.executable, "-m", "scaletool.train", *words], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while written(tmp_path / "out") < ENOUGH_STEPS and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    helpers = psutil.Process(process.pid).children(recursive=True)
    assert form != "stream" or len(helpers) >= 2  # the fork server and a loader process
    process.kill()
    process.wait()
    assert psutil.wait_procs(helpers, timeout=15)[1] == []
    consumed = samples_up_to_the_cut(tmp_path / "out")
    assert len(consumed) >= ENOUGH_STEPS

    config = load_config(None, overrides).run
    beginning = loaded_rows(config, 1, 0)
    assert all(consumed[step] == beginning[step] for step in consumed.keys() & beginning.keys())
    position = max(consumed)
    following = loaded_rows(config, 1, position)
    assert min(following) == position + 1
    assert following == loaded_rows(config, 2, position)
    uninterrupted = loaded_rows(config, 1, position - 2)
    assert consumed[position] == uninterrupted[position]
    assert following[position + 1] == uninterrupted[position + 1]


def written(out: Path) -> int:
    path = out / "samples.rank0.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


def samples_up_to_the_cut(out: Path) -> dict[int, list[int]]:
    """The steps that the killed process wrote down whole."""
    path = out / "samples.rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)))
    return samples(out)
