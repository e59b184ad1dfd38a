"""The order where not every unit is permuted by itself: blocks, windows, and data that no memory would hold."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import numpy as np
import pytest

from scaletool.train.data import order as order_module
from scaletool.train.data.order import GlobalOrder

LENGTHS = np.random.default_rng(0).geometric(0.02, size=2000).astype(np.int32)


def epoch(order: GlobalOrder, number: int) -> list[list[int]]:
    steps = range(number * order.steps_per_epoch, (number + 1) * order.steps_per_epoch)
    return [order.global_batch(step).tolist() for step in steps]


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize(("block", "window"), [(1, 1), (2, 10), (3, 64), (7, 40), (16, 16), (64, 500), (5000, 7)])
def test_every_unit_once_an_epoch(block: int, window: int, bucketed: bool) -> None:
    for units, batch in itertools.product((1, 2, 15, 16, 17, 128, 129, 999), (1, 3, 8, 130)):
        order = GlobalOrder(
            units, batch, 4, LENGTHS[:units] if bucketed else None, block_units=block, window_units=window
        )
        for number in (0, 1, 5):
            taken = epoch(order, number)
            assert sorted(itertools.chain.from_iterable(taken)) == list(range(units)), (units, batch)
            assert [len(each) for each in taken[:-1]] == [batch] * (len(taken) - 1)


def test_blocks_come_of_themselves_where_there_are_many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "MOST_BLOCKS", 10)
    for units in (1, 9, 10, 11, 99, 100, 101, 1003):
        order = GlobalOrder(units, 8, window_units=50)
        assert order.block == -(-units // 10)
        for number in (0, 1):
            assert sorted(itertools.chain.from_iterable(epoch(order, number))) == list(range(units))


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize(("block", "window"), [(None, 1 << 17), (4, 100), (16, 64)])
def test_a_step_is_the_same_however_it_is_reached(block: int | None, window: int, lengths: np.ndarray | None) -> None:
    def make() -> GlobalOrder:
        return GlobalOrder(1501, 32, 7, lengths, block_units=block, window_units=window)

    walked, jumping = make(), make()
    steps = range(3 * walked.steps_per_epoch)
    expected = [walked.global_batch(step).tolist() for step in steps]
    for step in random.Random(0).choices(steps, k=200):
        assert jumping.global_batch(step).tolist() == expected[step]
    for step in (0, 50, 140):
        assert make().global_batch(step).tolist() == expected[step]


def test_epochs_and_seeds_differ_with_blocks() -> None:
    orders = [GlobalOrder(2000, 16, seed, block_units=8, window_units=160) for seed in (0, 1)]
    seen = [epoch(order, number) for order in orders for number in (0, 1)]
    assert all(first != second for first, second in itertools.combinations(seen, 2))
    last = {tuple(sorted(epoch(orders[0], number)[-1])) for number in range(5)}
    assert len(last) == 5  # the same units are not always last


def test_a_window_holds_blocks_from_all_over_the_data() -> None:
    order = GlobalOrder(100_000, 10, block_units=10, window_units=1000)
    window = np.concatenate([order.global_batch(step) for step in range(100)])
    assert len(np.unique(window // 10_000)) == 10
    assert all(len(set(order.global_batch(step) // 10)) > 5 for step in range(100))  # neighbours are not together


@pytest.mark.parametrize("settings", [{}, {"block_units": 256, "window_units": 16384}])
def test_hundred_million_units_take_little_memory(settings: dict[str, int]) -> None:
    units, batch = 100_000_000, 4096 * 8
    tracemalloc.start()
    try:
        order = GlobalOrder(units, batch, seed=3, **settings)
        deep = order.steps_per_epoch * 2 + 2017
        taken = [order.global_batch(step) for step in (0, deep, order.steps_per_epoch - 1)]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10 << 20
    assert np.array_equal(GlobalOrder(units, batch, seed=3, **settings).global_batch(deep), taken[1])
    assert [len(np.unique(each)) for each in taken] == [batch, batch, units % batch]
    assert all(0 <= each.min() and each.max() < units for each in taken)
