"""Collated micro-batches, and the loss that their shares add up to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scaletool.config import RunConfig
from scaletool.train.data.batches import IGNORED_LABEL, Collator, MicroBatch, ShardSampler, make_loader
from scaletool.train.data.order import GlobalOrder
from scaletool.train.data.tokenise import TokenisedData, load_data
from scaletool.train.data.tokenizer import load_tokenizer
from scaletool.train.loss import loss_share
from scaletool.train.model import build_model

Make = Callable[..., RunConfig]
PAD, END = 0, 1


@pytest.fixture
def data(tiny: Make, tmp_path: Path) -> TokenisedData:
    config = tiny()
    return load_data(config, tmp_path / "cache", load_tokenizer(config, tmp_path / "cache"))[0]


@pytest.fixture
def model(tiny: Make, tmp_path: Path) -> torch.nn.Module:
    config = tiny()
    return build_model(config, load_tokenizer(config, tmp_path / "cache"))


def collate(data: TokenisedData, indices: list[int], step_target_tokens: int | None = None) -> dict[str, Any]:
    tokens = int(data.target_lengths[indices].sum()) if step_target_tokens is None else step_target_tokens
    batch = Collator(data, PAD)[MicroBatch(0, 1, 0, (tuple(indices),), tokens)]
    assert not isinstance(batch, Exception)
    return {**batch, "step_target_tokens": tokens}


def test_padded_to_the_longest_in_eights(data: TokenisedData) -> None:
    for indices in ([0], [1, 2, 3], [59, 4, 17, 8], list(range(60))):
        batch = collate(data, indices)
        for name, lengths in (("input_ids", data.source_lengths), ("labels", data.target_lengths)):
            longest = int(lengths[indices].max())
            assert batch[name].shape == (len(indices), -(-longest // 8) * 8)
            assert batch[name].dtype == torch.int64


def test_rows_of_a_batch(data: TokenisedData) -> None:
    indices = [3, 40, 11]
    batch = collate(data, indices)
    for place, pair in enumerate(data.pairs(indices)):
        source, target = pair.source.tolist(), pair.target.tolist()
        assert source[-1] == target[-1] == END
        assert batch["input_ids"][place].tolist() == source + [PAD] * (batch["input_ids"].shape[1] - len(source))
        assert batch["labels"][place].tolist() == target + [IGNORED_LABEL] * (batch["labels"].shape[1] - len(target))
        assert batch["attention_mask"][place].sum() == len(source)
        assert batch["attention_mask"][place, : len(source)].all()


def test_decoder_input_is_what_t5_itself_would_make(data: TokenisedData, model: Any) -> None:
    batch = collate(data, [5, 6, 7, 23])
    expected = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert torch.equal(batch["decoder_input_ids"], expected)
    assert (batch["decoder_input_ids"][:, 0] == PAD).all()


def test_counts_are_those_of_real_tokens(data: TokenisedData) -> None:
    indices = [9, 2, 30]
    batch = collate(data, indices)
    info = batch["info"]
    assert info.rows == tuple(data.numbers[indices])
    assert info.source_tokens == data.source_lengths[indices].sum() == batch["attention_mask"].sum()
    assert info.target_tokens == data.target_lengths[indices].sum() == (batch["labels"] != IGNORED_LABEL).sum()
    assert info.padded_tokens == batch["input_ids"].numel() + batch["labels"].numel()


def test_empty_micro_batch_has_no_loss_and_a_finite_gradient(data: TokenisedData, model: torch.nn.Module) -> None:
    batch = collate(data, [], step_target_tokens=17)
    assert (batch["labels"] == IGNORED_LABEL).all()
    assert (batch["info"].rows, batch["info"].source_tokens, batch["info"].target_tokens) == ((), 0, 0)
    loss = loss_share(model, batch)
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in model.named_parameters():  # a missing gradient would hang a wrapped engine
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_loss_is_t5s_own_where_there_is_one_batch(data: TokenisedData, model: Any) -> None:
    batch = collate(data, [1, 20, 33, 47])
    names = ("input_ids", "attention_mask", "labels")
    own = type(model).forward(model, **{name: batch[name] for name in names}).loss
    torch.testing.assert_close(loss_share(model, batch), own)


@pytest.mark.parametrize("split", [[4, 4], [1, 7], [1] * 8, [8, 0], [3, 5, 0]])
def test_shares_of_a_split_add_up(split: list[int], data: TokenisedData, model: torch.nn.Module) -> None:
    indices = [0, 59, 7, 31, 12, 44, 25, 3]
    tokens = int(data.target_lengths[indices].sum())
    whole = loss_share(model, collate(data, indices))
    whole.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()

    rest, total = list(indices), torch.zeros(())
    for size in split:
        share = loss_share(model, collate(data, rest[:size], tokens))
        share.backward()
        total, rest = total + share.detach(), rest[size:]
    torch.testing.assert_close(total, whole.detach())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_gives_the_batches_of_the_sampler(workers: int, data: TokenisedData) -> None:
    order = GlobalOrder(len(data), 16, lengths=data.source_lengths)
    sampler = ShardSampler(
        order, data.target_lengths, rank=1, world_size=2, per_device_batch_size=4, steps=range(order.steps_per_epoch)
    )
    loader = make_loader(data, sampler, PAD, num_workers=workers)
    infos = [batch["info"] for batch in loader]
    assert [info.micro for info in infos] == list(sampler)
    assert len(loader) == len(infos) == 8
    rows = np.array(data.numbers)
    assert [list(info.rows) for info in infos] == [rows[list(micro.indices[0])].tolist() for micro in sampler]
