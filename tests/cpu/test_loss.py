"""The loss is the same number, with the same gradient, however rows are put together and logits are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scaletool.config import RunConfig
from scaletool.train import loss as loss_module
from scaletool.train.data.batches import IGNORED_LABEL, Collator, MicroBatch
from scaletool.train.data.groups import pack, target_slots
from scaletool.train.data.tokenise import TokenisedData, load_data
from scaletool.train.data.tokenizer import load_tokenizer
from scaletool.train.loss import loss_share, loss_sum
from scaletool.train.model import build_model

Make = Callable[..., RunConfig]
Rows = Sequence[Sequence[int]]
PAD = 0


@pytest.fixture
def data(tiny: Make, tmp_path: Path) -> TokenisedData:
    config = tiny()
    return load_data(config, tmp_path / "cache", load_tokenizer(config, tmp_path / "cache"))[0]


@pytest.fixture
def build(tiny: Make, tmp_path: Path) -> Callable[..., torch.nn.Module]:
    def make(**changes: Any) -> torch.nn.Module:
        config = tiny(**changes)
        return build_model(config, load_tokenizer(config, tmp_path / "cache"))

    return make


def collate(data: TokenisedData, rows: Rows, *, packed: bool) -> dict[str, Any]:
    batch = Collator(data, PAD, packed)[MicroBatch(0, 1, 0, tuple(map(tuple, rows)), None)]
    assert isinstance(batch, dict)
    return {**batch, "step_target_tokens": batch["info"].target_tokens}


def loss_and_gradient(model: torch.nn.Module, *batches: dict[str, Any]) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for batch in batches:
        share = loss_sum(model, batch)
        share.backward()  # type: ignore[no-untyped-call]
        total += share.item()
    return total, [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]


def check_same(first: tuple[float, list[torch.Tensor]], second: tuple[float, list[torch.Tensor]]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-5)
    for one, other in zip(first[1], second[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()) + 1e-7)


# --- packed rows


PACKINGS: list[Rows] = [
    [[3]],
    [[3, 4]],
    [[0, 1, 2], [3], [4, 5]],
    [[7, 8, 9, 10, 11, 12], [59]],
    [[20, 21], []],
]


@pytest.mark.parametrize("rows", PACKINGS, ids=str)
def test_packed_rows_have_the_loss_and_gradient_of_separate_ones(
    rows: Rows, data: TokenisedData, build: Callable[..., torch.nn.Module]
) -> None:
    model = build()
    alone = [collate(data, [[row]], packed=False) for members in rows for row in members]
    together = collate(data, [[row for members in rows for row in members]], packed=False)
    expected = loss_and_gradient(model, *alone)
    check_same(loss_and_gradient(model, collate(data, rows, packed=True)), expected)
    check_same(loss_and_gradient(model, together), expected)


@pytest.mark.parametrize("name", ["tiny", "v1_1"])
def test_packing_of_all_the_data(name: str, data: TokenisedData, build: Callable[..., torch.nn.Module]) -> None:
    model = build()
    if name == "v1_1":
        model.config.scale_decoder_outputs = False  # type: ignore[union-attr]
    slots = 256
    made = pack(
        data.source_lengths, data.target_lengths, slots, target_slots(data.source_lengths, data.target_lengths, slots)
    )
    batch = collate(data, [made.rows(group).tolist() for group in range(len(made))], packed=True)
    assert sorted(batch["info"].rows) == list(range(60))
    assert batch["input_ids"].shape[1] <= slots
    check_same(
        loss_and_gradient(model, batch),
        loss_and_gradient(model, *(collate(data, [[row]], packed=False) for row in range(60))),
    )


def test_layout_of_a_packed_row(data: TokenisedData) -> None:
    rows = [[5, 9], [2]]
    batch = collate(data, rows, packed=True)
    assert "attention_mask" not in batch
    for place, members in enumerate(rows):
        pairs = data.pairs(members)
        for tokens, segments, texts, padding in (
            ("input_ids", "source_segments", [pair.source for pair in pairs], PAD),
            ("labels", "target_segments", [pair.target for pair in pairs], IGNORED_LABEL),
        ):
            width = batch[tokens].shape[1]
            assert width % 8 == 0
            filled = np.concatenate(texts).tolist()
            assert batch[tokens][place].tolist() == filled + [padding] * (width - len(filled))
            numbers = [number for number, text in enumerate(texts, start=1) for _ in text]
            assert batch[segments][place].tolist() == numbers + [0] * (width - len(numbers))
        at = 0
        for pair in pairs:
            seen = batch["decoder_input_ids"][place, at : at + len(pair.target)].tolist()
            assert seen == [PAD, *pair.target[:-1].tolist()]  # each begins with the start mark
            at += len(pair.target)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [[[1, 2, 3]], [[]], [[40], [41]]])
def test_label_places_are_those_of_real_labels(rows: Rows, packed: bool, data: TokenisedData) -> None:
    batch = collate(data, rows, packed=packed)
    labels = batch["labels"].view(-1)
    assert batch["label_places"].dtype == torch.int64
    assert batch["label_places"].tolist() == (labels != IGNORED_LABEL).nonzero().view(-1).tolist()
    assert len(batch["label_places"]) == batch["info"].target_tokens


def test_counts_of_a_packed_batch(data: TokenisedData) -> None:
    batch = collate(data, [[5, 9], [2]], packed=True)
    info = batch["info"]
    assert info.rows == (5, 9, 2)
    assert info.source_tokens == data.source_lengths[[5, 9, 2]].sum() == (batch["source_segments"] > 0).sum()
    assert info.target_tokens == data.target_lengths[[5, 9, 2]].sum()
    assert info.padded_tokens == batch["input_ids"].numel() + batch["labels"].numel()


def test_packed_batch_without_rows_has_no_loss_and_zero_gradients(
    data: TokenisedData, build: Callable[..., torch.nn.Module]
) -> None:
    total, gradients = loss_and_gradient(build(), collate(data, [], packed=True))
    assert total == 0.0
    assert not any(gradient.any() for gradient in gradients)


# --- logits in chunks, blocks computed again


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("logits", [1, 264, 3 * 264, 7 * 264 + 5])
def test_chunked_logits_change_nothing(
    logits: int,
    packed: bool,
    data: TokenisedData,
    build: Callable[..., torch.nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build()
    batch = collate(data, [[0, 30], [59, 4], [17]], packed=packed)
    expected = loss_and_gradient(model, batch)
    calls: list[int] = []
    inner = loss_module._cross_entropy
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", logits)
    monkeypatch.setattr(
        loss_module,
        "_cross_entropy",
        lambda head, hidden, wanted: (calls.append(len(wanted)), inner(head, hidden, wanted))[1],
    )
    check_same(loss_and_gradient(model, batch), expected)
    assert max(calls) <= max(1, logits // 264)
    assert sum(calls) == 2 * len(batch["label_places"])  # once forward, once again in backward


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_checkpointing_changes_nothing(
    packed: bool, data: TokenisedData, build: Callable[..., torch.nn.Module]
) -> None:
    batch = collate(data, [[0, 30], [59, 4], [17]], packed=packed)
    plain, again = build().train(), build(model__gradient_checkpointing=True).train()
    assert again.is_gradient_checkpointing  # type: ignore[union-attr]
    assert not plain.is_gradient_checkpointing  # type: ignore[union-attr]
    check_same(loss_and_gradient(again, batch), loss_and_gradient(plain, batch))


def test_share_is_the_sum_over_the_tokens_of_the_step(
    data: TokenisedData, build: Callable[..., torch.nn.Module]
) -> None:
    model, batch = build(), collate(data, [[1, 2]], packed=False)
    assert loss_share(model, {**batch, "step_target_tokens": 50}).item() == pytest.approx(
        loss_sum(model, batch).item() / 50
    )
