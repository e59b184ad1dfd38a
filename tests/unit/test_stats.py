"""Figures against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from records import good_record

from scaletool.sweep.attribution import missing_speed, wait_shares
from scaletool.sweep.stats import estimate, rates, ratio, t_quantile


def test_one_round_has_no_interval() -> None:
    found = estimate([5.0])
    assert (found.median, found.low, found.high) == (5.0, None, None)
    assert not found.differs_from_one


def test_interval_of_two_rounds_by_hand() -> None:
    # logs 0 and 0.02: mean 0.01, sd 0.02/sqrt(2), half = 12.706 * sd / sqrt(2) = 12.706 * 0.01
    found = estimate([1.0, math.exp(0.02)])
    assert found.low == pytest.approx(math.exp(0.01 - 0.12706))
    assert found.high == pytest.approx(math.exp(0.01 + 0.12706))


def test_ratio_is_paired_by_round() -> None:
    # Each round twice as fast, whatever the round's own speed: no spread is left.
    found = ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert found.median == 2.0
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)
    assert found.differs_from_one


def test_quantiles() -> None:
    assert t_quantile(1) == 12.706
    assert t_quantile(10) == 2.228
    assert t_quantile(30) == 2.042
    assert t_quantile(100) == 1.960


def test_rates_are_counted_work_over_the_window() -> None:
    # 4 steps of 0.1 s with 2 x 8 samples: 64 / 0.4 = 160 samples/s, 100 real and 150 padded tokens each.
    found = rates(good_record(0.1, gpus=2))
    assert found["samples_per_second"] == pytest.approx(160)
    assert found["real_tokens_per_second"] == pytest.approx(16_000)
    assert found["padded_tokens_per_second"] == pytest.approx(24_000)


def test_parts_of_the_missing_speed_add_up() -> None:
    slow, fast = good_record(0.2, gpus=2), good_record(0.1)
    for rank, seconds in enumerate((0.2, 0.1)):  # rank 1 is done earlier and waits 0.1 s: mean 0.15 of 0.2
        slow["ranks"][rank]["seconds"] = [seconds] * 6
    assert wait_shares([slow]) == pytest.approx({"data_wait": 0.1, "slowest_rank": 0.25})
    parts = missing_speed([slow], [fast], efficiency=0.5)
    assert parts["slowest_rank"] == pytest.approx(0.25)
    assert parts["data_wait"] == pytest.approx(0.05)
    assert sum(parts.values()) == pytest.approx(0.5)
