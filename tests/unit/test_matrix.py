from __future__ import annotations

import pytest

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.sweep.matrix import MODES, make_cells, parse_counts, parse_names, round_order


def test_cells_are_every_combination_with_modes_side_by_side() -> None:
    cells = make_cells([1, 2], ["ddp", "zero2"], ["custom", "trainer"], ["weak"], RunConfig())
    assert [cell.name for cell in cells][:4] == [
        "ddp-custom-weak-1gpu",
        "ddp-trainer-weak-1gpu",
        "ddp-custom-weak-2gpu",
        "ddp-trainer-weak-2gpu",
    ]
    assert len(cells) == 8
    assert {cell.per_device_batch_size for cell in cells} == {8}


def test_strong_scaling_keeps_the_global_batch_of_the_smallest_count() -> None:
    cells = make_cells([2, 4, 8], ["ddp"], ["custom"], ["strong"], RunConfig())
    assert [(cell.gpus, cell.per_device_batch_size) for cell in cells] == [(2, 8), (4, 4), (8, 2)]


def test_strong_scaling_refuses_what_does_not_divide_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        make_cells([1, 3], ["ddp"], ["custom"], ["strong"], RunConfig())
    assert "8 x 1 x accumulation 1 = 8" in str(caught.value)
    assert "3 GPUs (8/3 = 2.67)" in str(caught.value)
    assert "1, 2, 4, 8" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["0", "-1", "1,x", "", ",", "1,1", "1,01", "1.5", "2,0", "4097", "9" * 5000])
def test_bad_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_counts(text)


def test_fitting_counts_are_found_quickly_and_start_at_the_smallest() -> None:
    config = RunConfig().replace(data__per_device_batch_size=2**20)
    with pytest.raises(ConfigError) as caught:
        make_cells([4, 12], ["ddp"], ["custom"], ["strong"], config)
    assert "counts that divide: 4, 8, 16, 32" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["fast", "", "custom,custom", "custom,slow"])
def test_bad_modes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_names(text, "--modes", MODES)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_hsdp_needs_two_by_two(count: int) -> None:
    with pytest.raises(ConfigError, match="hsdp needs an even count"):
        make_cells([count], ["hsdp"], ["custom"], ["weak"], RunConfig())


def test_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        make_cells([1], ["zero22"], ["custom"], ["weak"], RunConfig())
    assert "zero2" in str(caught.value.hint)


def test_rounds_run_forwards_and_backwards() -> None:
    cells = make_cells([1, 2], ["ddp"], ["custom"], ["weak"], RunConfig())
    assert round_order(cells, 1) == cells
    assert round_order(cells, 2) == cells[::-1]
    assert round_order(cells, 3) == cells
