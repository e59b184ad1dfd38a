"""One order for every world size and mode: invariants 1, 3 and 4, seen from outside by samples and losses."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest
from launching import Finished, accelerate_launch, python, samples, torchrun

ROWS, GLOBAL_BATCH, EPOCHS = 203, 12, 2
STEPS_PER_EPOCH = 17  # ceil(203 / 12)
# fp32 over 34 steps: world sizes sum in different orders, and Adam's division makes rounding grow slowly.
CURVE_TOLERANCE = 1e-4


def arguments(rows_file: Path, batch: int, mode: str, accumulation: int = 1, *more: str) -> list[str]:
    settings = [
        f"data.train={rows_file}",
        f"data.per_device_batch_size={batch}",
        f"train.gradient_accumulation_steps={accumulation}",
        f"train.epochs={EPOCHS}",
        "measure.record_samples=true",
        *more,
    ]
    return ["--mode", mode, *(part for setting in settings for part in ("--set", setting))]


@pytest.fixture(scope="module")
def reference(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, dict[int, list[int]]]:
    out = tmp_path_factory.mktemp("one")
    return python(*arguments(rows_file, 12, "custom"), out=out), samples(out)


def test_every_row_once_an_epoch(reference: tuple[Finished, dict[int, list[int]]]) -> None:
    done, batches = reference
    assert len(done.record["steps"]) == EPOCHS * STEPS_PER_EPOCH
    for epoch in range(EPOCHS):
        steps = range(1 + epoch * STEPS_PER_EPOCH, 1 + (epoch + 1) * STEPS_PER_EPOCH)
        assert sorted(row for step in steps for row in batches[step]) == list(range(ROWS))
    assert batches[1] != batches[1 + STEPS_PER_EPOCH], "epochs must differ in their order"


@pytest.mark.parametrize(
    ("launcher", "processes", "batch", "accumulation", "mode"),
    [
        ("python", 1, 12, 1, "trainer"),
        ("torchrun", 2, 6, 1, "custom"),
        ("ddp", 2, 6, 1, "trainer"),
        ("fsdp", 3, 4, 1, "custom"),
        ("zero2", 3, 4, 1, "trainer"),
        ("ddp", 4, 1, 3, "custom"),
        ("zero2", 2, 3, 2, "trainer"),
    ],
)
def test_same_batches_and_losses(
    launcher: str,
    processes: int,
    batch: int,
    accumulation: int,
    mode: str,
    rows_file: Path,
    tmp_path: Path,
    reference: tuple[Finished, dict[int, list[int]]],
) -> None:
    words = arguments(rows_file, batch, mode, accumulation)
    if launcher == "python":
        done = python(*words, out=tmp_path)
    elif launcher == "torchrun":
        done = torchrun(processes, *words, out=tmp_path)
    else:
        done = accelerate_launch(launcher, processes, *words, out=tmp_path)
    expected, batches = reference
    assert samples(tmp_path) == batches
    assert done.losses[0] == pytest.approx(expected.losses[0], abs=2e-6)
    assert done.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=1e-5)
    assert done.losses == pytest.approx(expected.losses, abs=CURVE_TOLERANCE)
    assert done.record["plan"]["optimizer_steps"] == EPOCHS * STEPS_PER_EPOCH


FORMS = {
    "packed": ["data.batching=packed"],
    "budget": ["data.max_batch_tokens=400"],
    "stream": ["data.streaming=true", "data.num_workers=2"],
}


@pytest.mark.parametrize(
    ("form", "launcher", "processes", "batch", "accumulation", "mode"),
    [
        ("packed", "ddp", 2, 6, 1, "trainer"),
        ("packed", "zero3", 3, 2, 2, "custom"),
        ("packed", "fsdp", 2, 3, 2, "trainer"),
        ("budget", "ddp", 2, 1, 6, "custom"),
        ("stream", "ddp", 3, 2, 2, "trainer"),
        ("stream", "zero2", 2, 6, 1, "custom"),
    ],
)
def test_every_form_of_batches(
    form: str,
    launcher: str,
    processes: int,
    batch: int,
    accumulation: int,
    mode: str,
    rows_file: Path,
    tmp_path: Path,
    alone: dict[str, tuple[Finished, dict[int, list[int]]]],
) -> None:
    expected, batches = alone[form]
    words = arguments(shards(rows_file) if form == "stream" else rows_file, batch, mode, accumulation, *FORMS[form])
    done = accelerate_launch(launcher, processes, *words, out=tmp_path)
    assert samples(tmp_path) == batches
    assert sorted(row for rows in batches.values() for row in rows) == sorted([*range(ROWS)] * EPOCHS)
    assert done.losses == pytest.approx(expected.losses, abs=CURVE_TOLERANCE)


@pytest.fixture(scope="module")
def alone(
    rows_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Finished, dict[int, list[int]]]]:
    """Every form on one process."""
    runs = {}
    for form, settings in FORMS.items():
        out = tmp_path_factory.mktemp(form)
        batch, accumulation = (1, 12) if form == "budget" else (12, 1)
        done = python(*arguments(rows_file, batch, "custom", accumulation, *settings), out=out)
        runs[form] = (done, samples(out))
    return runs


def shards(rows_file: Path) -> Path:
    """The same rows in five files of very different size, the first one compressed: a glob."""
    folder = rows_file.with_suffix(".shards")
    if not folder.is_dir():
        folder.mkdir()
        lines = rows_file.read_bytes().splitlines(keepends=True)
        for number, (start, stop) in enumerate(itertools.pairwise([0, 90, 91, 95, 200, ROWS])):
            content = b"".join(lines[start:stop])
            path = folder / f"{number}.jsonl"
            path.write_bytes(gzip.compress(content) if number == 0 else content)
    return folder / "*.jsonl"
