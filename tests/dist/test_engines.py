"""Every profile in both modes on 2 real processes: the engine is the profile's, and the numbers are DDP's."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from launching import Finished, accelerate_launch

# Same fp32 sums in another order: engines differ by rounding only, some 1e-6 after six steps.
LOSS_TOLERANCE = 2e-5
PROFILES = ["ddp", "zero1", "zero2", "zero2_offload", "zero3", "fsdp", "fsdp_grad_op"]


def launch(
    profile: str, mode: str, rows_file: Path, out: Path, processes: int = 2, flags: tuple[str, ...] = ()
) -> Finished:
    settings = [
        "train.max_steps=6",
        "train.gradient_accumulation_steps=2",
        f"data.train={rows_file}",
        "data.per_device_batch_size=4",
    ]
    if processes == 4:
        settings[-1] = "data.per_device_batch_size=2"
    arguments = [part for setting in settings for part in ("--set", setting)]
    return accelerate_launch(profile, processes, "--mode", mode, *arguments, flags=flags, out=out)


@pytest.fixture(scope="module")
def reference(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return launch("ddp", "custom", rows_file, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("mode", ["custom", "trainer"])
@pytest.mark.parametrize("profile", PROFILES)
def test_engine_is_the_profiles_and_agrees_with_ddp(
    profile: str, mode: str, rows_file: Path, tmp_path: Path, reference: Finished
) -> None:
    done = launch(profile, mode, rows_file, tmp_path)
    assert done.record["observed"]["engine"] == profile
    assert done.record["observed"] == done.record["requested"]
    assert done.losses == pytest.approx(reference.losses, abs=LOSS_TOLERANCE)
    assert done.grad_norms == pytest.approx(reference.grad_norms, rel=1e-4)
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("mode", ["custom", "trainer"])
def test_hsdp_on_two_by_two(mode: str, rows_file: Path, tmp_path: Path, reference: Finished) -> None:
    flags = ("--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2")
    done = launch("hsdp", mode, rows_file, tmp_path, processes=4, flags=flags)
    assert done.record["observed"]["engine"] == "hsdp"
    assert done.losses == pytest.approx(reference.losses, abs=LOSS_TOLERANCE)


def test_validation_is_the_same_under_a_sharded_engine(rows_file: Path, tmp_path: Path) -> None:
    """Validation between steps, loader processes, and the saved model: none of it may depend on engine or mode."""
    settings = [
        f"data.train={rows_file}",
        "data.validation=0.1",
        "train.eval_every=2",
        "train.max_steps=5",
        "data.num_workers=1",
    ]
    arguments = [part for setting in settings for part in ("--set", setting)]
    plain = accelerate_launch("ddp", 2, *arguments, out=tmp_path / "ddp")
    sharded = accelerate_launch("zero3", 2, "--mode", "trainer", *arguments, out=tmp_path / "zero3")
    assert [entry["step"] for entry in plain.record["validation"]] == [2, 4, 5]
    for one, other in zip(plain.record["validation"], sharded.record["validation"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=LOSS_TOLERANCE)
    weights = [
        safetensors.torch.load_file(tmp_path / name / "model" / "model.safetensors") for name in ("ddp", "zero3")
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=LOSS_TOLERANCE), name
