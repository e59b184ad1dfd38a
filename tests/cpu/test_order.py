"""The global order and its shards: every row once, the same for every world."""

from __future__ import annotations

import numpy as np
import pytest

from scaletool.train.data.batches import MicroBatch, ShardSampler, deal
from scaletool.train.data.order import GlobalOrder

LENGTHS = np.random.default_rng(0).geometric(0.02, size=5000).astype(np.int32)
"""Ragged, with a long tail, as texts are."""


def batches(order: GlobalOrder, steps: range) -> list[list[int]]:
    return [order.global_batch(step).tolist() for step in steps]


def epoch(order: GlobalOrder, number: int = 0) -> list[list[int]]:
    return batches(order, range(number * order.steps_per_epoch, (number + 1) * order.steps_per_epoch))


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 64, 100])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 63, 64, 65, 1000])
def test_every_row_once_an_epoch(rows: int, batch: int, bucketed: bool) -> None:
    order = GlobalOrder(rows, batch, seed=3, lengths=LENGTHS[:rows] if bucketed else None)
    for number in range(3):
        taken = epoch(order, number)
        assert sorted(row for rows_of_batch in taken for row in rows_of_batch) == list(range(rows))
        assert [len(each) for each in taken[:-1]] == [batch] * (len(taken) - 1)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_same_sequence_twice_and_without_walking(lengths: np.ndarray | None) -> None:
    first, second = (GlobalOrder(5000, 32, seed=1, lengths=lengths) for _ in range(2))
    steps = range(3 * first.steps_per_epoch)
    walked = batches(first, steps)
    assert walked == batches(second, steps)
    assert [second.global_batch(step).tolist() for step in reversed(steps)] == walked[::-1]


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_epochs_and_seeds_differ(lengths: np.ndarray | None) -> None:
    order, other = (GlobalOrder(5000, 32, seed=seed, lengths=lengths) for seed in (0, 1))
    assert epoch(order, 0) != epoch(order, 1)
    assert epoch(order, 0) != epoch(other, 0)
    assert {frozenset(batch) for batch in epoch(order, 0)} != {frozenset(batch) for batch in epoch(order, 1)}


def test_random_order_does_not_follow_the_source() -> None:
    order = np.concatenate(epoch(GlobalOrder(5000, 32)))
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.1


def padding(order: GlobalOrder) -> float:
    slots = sum(len(batch) * LENGTHS[batch].max() for batch in epoch(order))
    return float(1 - LENGTHS.sum() / slots)


def test_buckets_save_padding() -> None:
    bucketed, mixed = padding(GlobalOrder(5000, 32, lengths=LENGTHS)), padding(GlobalOrder(5000, 32))
    assert bucketed < 0.15
    assert mixed > 0.6


def test_buckets_are_not_trained_from_short_to_long() -> None:
    means = [LENGTHS[batch].mean() for batch in epoch(GlobalOrder(5000, 32, lengths=LENGTHS))[:-1]]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


def test_validation_keeps_the_source_order() -> None:
    order = GlobalOrder(10, 4, shuffle=False)
    assert epoch(order) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert epoch(order, 1) == epoch(order)


def test_locate_counts_from_zero() -> None:
    order = GlobalOrder(10, 4)
    assert [order.locate(step) for step in (0, 2, 3, 7)] == [(0, 0), (0, 2), (1, 0), (2, 1)]


def rows_of(micro: MicroBatch) -> list[int]:
    return [row for rows in micro.indices for row in rows]


def shards(order: GlobalOrder, world: int, batch: int, steps: range) -> list[list[MicroBatch]]:
    lengths = LENGTHS[: order.num_units]
    return [
        list(ShardSampler(order, lengths, rank=rank, world_size=world, per_device_batch_size=batch, steps=steps))
        for rank in range(world)
    ]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_share_every_global_batch(world: int, accumulation: int) -> None:
    per_device = 2
    for rows in range(1, 51):
        order = GlobalOrder(rows, world * per_device * accumulation, lengths=LENGTHS[:rows])
        steps = range(2 * order.steps_per_epoch + 1)
        ranks = shards(order, world, per_device, steps)
        assert {len(rank) for rank in ranks} == {len(steps) * accumulation}
        for step in steps:
            micros = [micro for rank in ranks for micro in rank[step * accumulation : (step + 1) * accumulation]]
            batch = order.global_batch(step).tolist()
            assert sorted(index for micro in micros for index in rows_of(micro)) == sorted(batch)
            assert max(len(rows_of(micro)) for micro in micros) <= per_device
            assert {micro.step_target_tokens for micro in micros} == {int(LENGTHS[batch].sum())}
            assert {(micro.epoch, micro.step) for micro in micros} == {(step // order.steps_per_epoch, step + 1)}
            assert {micro.micro_step for micro in micros} == set(range(accumulation))


def test_length_of_a_sampler_and_of_later_steps() -> None:
    order = GlobalOrder(40, 8)
    (whole,), (rest,) = (shards(order, 1, 4, steps) for steps in (range(9), range(6, 9)))
    assert rest == whole[12:]
    sampler = ShardSampler(order, LENGTHS, rank=0, world_size=1, per_device_batch_size=4, steps=range(6, 9))
    assert len(sampler) == len(rest)


def test_global_batches_are_the_same_for_every_world() -> None:
    seen = []
    for world, per_device, accumulation in ((1, 8, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 1, 8)):
        order = GlobalOrder(50, 8, seed=5, lengths=LENGTHS[:50])
        ranks = shards(order, world, per_device, range(14))
        assert len(ranks[0]) == 14 * accumulation
        rows: list[list[int]] = [[] for _ in range(14)]
        for rank in ranks:
            for micro in rank:
                rows[micro.step - 1] += rows_of(micro)
        seen.append([sorted(each) for each in rows])
    assert all(each == seen[0] for each in seen)


def test_ranks_get_texts_of_like_length() -> None:
    order = GlobalOrder(4096, 64, lengths=LENGTHS[:4096])
    first, second = ([LENGTHS[rows_of(micro)].sum() for micro in rank] for rank in shards(order, 2, 32, range(60)))
    assert abs(sum(first) / sum(second) - 1) < 0.02


@pytest.mark.parametrize("hands", [1, 2, 3, 4, 7])
def test_dealing_gives_every_unit_to_one_hand(hands: int) -> None:
    for units in range(40):
        dealt = deal(np.arange(100, 100 + units), hands)
        assert len(dealt) == hands
        assert sorted(np.concatenate(dealt)) == list(range(100, 100 + units))
        counts = [len(hand) for hand in dealt]
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)


def test_dealing_goes_to_and_fro() -> None:
    assert [hand.tolist() for hand in deal(np.arange(9), 3)] == [[0, 5, 6], [1, 4, 7], [2, 3, 8]]
    assert [hand.tolist() for hand in deal(np.arange(8), 3)] == [[0, 5, 6], [1, 4, 7], [2, 3]]
    assert [hand.tolist() for hand in deal(np.arange(5), 3)] == [[0, 3], [1, 4], [2]]
    work = [hand.sum() for hand in deal(np.arange(64), 4)]
    assert max(work) == min(work)  # dealing in one direction would give the last hand 48 more than the first
