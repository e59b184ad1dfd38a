"""From files to the batches of every rank: every row once an epoch, ranks in step, and a run that goes on anywhere."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.train.data.shards import Shards, load_shards
from scaletool.train.data.tokenizer import load_tokenizer

FILES = [13, 4, 17, 1, 8]
"""Rows of the files: uneven, one of them smaller than most worlds."""

Load = Callable[..., Shards]
Batch = tuple[int, int, int, tuple[int, ...], tuple[tuple[int, ...], ...], int | None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    numbers = iter(range(sum(FILES)))
    for number, rows in enumerate(FILES):
        lines = [
            json.dumps({"source": "source " * (1 + row * 7 % 12) + str(row), "target": "target " * (1 + row % 5)})
            + "\n"
            for row in itertools.islice(numbers, rows)
        ]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def load(folder: Path) -> Load:
    """Loads the first `files` files for one rank; other keywords are dotted keys of the config."""
    tokenizer = load_tokenizer(RunConfig(), folder)

    def call(
        files: int, *, rank: int = 0, world: int = 1, start: int = 0, batching: str = "bucketed", **changes: Any
    ) -> Shards:
        settings = {
            "data__train": [str(folder / f"{number}.jsonl") for number in range(files)],
            "data__batching": batching,
            "data__per_device_batch_size": 2,
            "data__shuffle_buffer": 16,
            "train__epochs": 2,
            **changes,
        }
        config = RunConfig().replace(**settings)
        return load_shards(config, folder / "cache", tokenizer, rank=rank, world_size=world, start_step=start)

    return call


def batches(shards: Shards) -> Iterator[Batch]:
    """What identifies a batch, and all its numbers."""
    for batch in shards.loader:
        assert not isinstance(batch, ConfigError), batch
        micro = batch["info"].micro
        tokens = tuple(
            tuple(row) for name in sorted(batch) if name != "info" for row in batch[name].view(1, -1).tolist()
        )
        yield micro.epoch, micro.step, micro.micro_step, batch["info"].rows, tokens, micro.step_target_tokens


KINDS: dict[str, dict[str, Any]] = {
    "padded": {"batching": "padded"},
    "bucketed": {},
    "packed": {"batching": "packed"},
    "budget": {"data__max_batch_tokens": 300, "data__per_device_batch_size": 1},
    "streamed padded": {"batching": "padded", "data__streaming": True},
    "streamed bucketed": {"data__streaming": True},
}


@pytest.mark.parametrize("files", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_once_an_epoch_over_all_ranks(kind: str, world: int, files: int, load: Load) -> None:
    ranks = [load(files, rank=rank, world=world, **KINDS[kind]) for rank in range(world)]
    plan = ranks[0].plan
    assert all(shards.plan == plan for shards in ranks)
    assert plan.rows == sum(FILES[:files])
    seen = [list(batches(shards)) for shards in ranks]
    assert {len(own) for own in seen} == {plan.optimizer_steps} == {2 * plan.steps_per_epoch}
    for epoch in (0, 1):
        rows = [row for own in seen for batch in own if batch[0] == epoch for row in batch[3]]
        assert sorted(rows) == list(range(plan.rows))
    for step in zip(*seen, strict=True):
        assert len({batch[:3] for batch in step}) == 1  # all ranks are at the same place
        assert len({batch[5] for batch in step}) == 1  # and divide by the same number
        counts = [len(batch[3]) for batch in step]
        if "packed" not in kind and kind != "budget":
            assert max(counts) - min(counts) <= 1
            assert max(counts) <= 2


@pytest.mark.parametrize("accumulation", [2, 3])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_keeps_every_row_and_every_micro_step(
    kind: str, world: int, accumulation: int, load: Load
) -> None:
    changes = {**KINDS[kind], "train__gradient_accumulation_steps": accumulation}
    ranks = [load(3, rank=rank, world=world, **changes) for rank in range(world)]
    seen = [list(batches(shards)) for shards in ranks]
    assert {len(own) for own in seen} == {ranks[0].plan.optimizer_steps * accumulation}
    for epoch in (0, 1):
        rows = [row for own in seen for batch in own if batch[0] == epoch for row in batch[3]]
        assert sorted(rows) == list(range(sum(FILES[:3])))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_any_step(kind: str, world: int, load: Load) -> None:
    for rank in range(world):
        whole = list(batches(load(5, rank=rank, world=world, **KINDS[kind])))
        steps = load(5, rank=rank, world=world, **KINDS[kind]).plan.optimizer_steps
        for start in {0, 1, steps // 2, steps // 2 + 1, steps - 1, steps}:
            rest = load(5, rank=rank, world=world, start=start, **KINDS[kind])
            assert rest.plan.optimizer_steps == steps
            assert list(batches(rest)) == whole[start:]


@pytest.mark.parametrize(("kind", "workers"), [("streamed bucketed", 2), ("packed", 1)])
def test_loader_processes_change_nothing(kind: str, workers: int, load: Load) -> None:
    settings = {"rank": 1, "world": 2, **KINDS[kind]}
    whole = list(batches(load(5, **settings)))
    assert list(batches(load(5, start=3, data__num_workers=workers, **settings))) == whole[3:]


@pytest.mark.parametrize("kind", KINDS)
def test_global_batches_do_not_depend_on_the_world(kind: str, load: Load) -> None:
    seen = []
    for world, accumulation in ((1, 4), (2, 2), (4, 1)):
        rows: dict[int, list[int]] = {}
        for rank in range(world):
            changes = {**KINDS[kind], "train__gradient_accumulation_steps": accumulation}
            for batch in batches(load(5, rank=rank, world=world, **changes)):
                rows.setdefault(batch[1], []).extend(batch[3])
        seen.append({step: sorted(members) for step, members in rows.items()})
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("kind", ["padded", "bucketed"])
def test_a_stream_trains_on_the_batches_of_its_kind(kind: str, load: Load) -> None:
    plain, streamed = (load(5, batching=kind, data__streaming=streaming) for streaming in (False, True))
    assert plain.plan == streamed.plan
    both = [{row: None for batch in batches(shards) for row in batch[3]} for shards in (plain, streamed)]
    assert set(both[0]) == set(both[1])


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_rows_stay_out_and_come_in_their_order(kind: str, load: Load) -> None:
    ranks = [load(5, rank=rank, world=2, data__validation=0.25, **KINDS[kind]) for rank in (0, 1)]
    trained = {row for shards in ranks for batch in batches(shards) for row in batch[3]}
    held_out = [row for shards in ranks for batch in shards.validation for row in batch["info"].rows]
    assert len(held_out) == len(set(held_out)) == round(0.25 * sum(FILES))
    assert trained | set(held_out) == set(range(sum(FILES)))
    assert trained.isdisjoint(held_out)
    assert len(ranks[0].validation) == len(ranks[1].validation)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_rows_than_processes_are_refused(kind: str, load: Load) -> None:
    with pytest.raises(ConfigError, match="13 training rows are fewer than 14 processes"):
        load(1, world=14, **KINDS[kind])


@pytest.mark.parametrize("kind", ["packed", "budget"])
def test_fewer_groups_than_processes_still_keep_all_ranks_in_step(kind: str, load: Load) -> None:
    ranks = [load(1, rank=rank, world=13, **KINDS[kind]) for rank in range(13)]
    seen = [list(batches(shards)) for shards in ranks]
    assert {len(own) for own in seen} == {ranks[0].plan.optimizer_steps}
    assert sorted(row for own in seen for batch in own if batch[0] == 0 for row in batch[3]) == list(range(13))


def test_limits_of_packed_rows_and_of_a_budget(load: Load) -> None:
    for batch in load(5, batching="packed", data__pack_tokens=400).loader:
        assert batch["input_ids"].shape[1] <= 400
        assert (batch["source_segments"].max(dim=1).values >= 1).all()
    assert max(int(batch["source_segments"].max()) for batch in load(5, batching="packed").loader) > 1
    for batch in load(5, **KINDS["budget"]).loader:
        assert batch["info"].padded_tokens <= 300 or len(batch["info"].rows) == 1


def test_what_a_stream_skips_leaves_the_ranks_in_step(load: Load, folder: Path) -> None:
    with (folder / "bad.jsonl").open("w") as stream:
        for row in range(21):
            stream.write("{\n" if row % 3 else json.dumps({"source": f"s{row}", "target": "t"}) + "\n")
    changes = {"data__train": [str(folder / "bad.jsonl")], "data__streaming": True, "data__on_bad_row": "skip"}
    ranks = [load(0, rank=rank, world=3, **changes) for rank in range(3)]
    seen = [list(shards.loader) for shards in ranks]
    assert {len(own) for own in seen} == {ranks[0].plan.optimizer_steps}
    infos = [batch["info"] for own in seen for batch in own if batch["info"].micro.epoch == 0]
    assert sorted(row for info in infos for row in info.rows) == list(range(0, 21, 3))
    assert len({problem for info in infos for problem in info.bad_rows}) == 14
    assert all(torch.is_tensor(batch["input_ids"]) and batch["input_ids"].numel() for own in seen for batch in own)


def test_notes_tell_of_skipped_rows_and_of_odd_files(load: Load, folder: Path) -> None:
    rows = b'{"source": "a", "target": "b"}\n' * 3 + b"{\n"
    (folder / "odd.jsonl").write_bytes(gzip.compress(rows))
    for _ in range(2):  # from the cache, too
        shards = load(0, data__train=[str(folder / "odd.jsonl")], data__on_bad_row="skip")
        assert (shards.skipped_rows, shards.plan.rows) == (1, 3)
        assert "odd.jsonl:4" in str(shards.first_skipped)
        assert any("is gzip data under another ending" in note for note in shards.notes)
        assert any("skipped 1 bad rows" in note for note in shards.notes)
