"""Which cells a sweep has, and in which order a round visits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaletool.config import RunConfig
from scaletool.errors import ConfigError
from scaletool.profiles import Profile, bind_deepspeed, find_profile

MODES = ("custom", "trainer")
SCALINGS = ("weak", "strong")
SMALLEST_HSDP = 4  # two replicas of two shards
MOST_PROCESSES = 4096  # beyond every cluster this is for: a slip of the finger


@dataclass(frozen=True)
class Cell:
    """One point of the sweep. per_device_batch_size is derived: fixed under weak scaling, shrinking under strong."""

    profile: Profile
    mode: str
    gpus: int
    scaling: str
    per_device_batch_size: int

    @property
    def name(self) -> str:
        return f"{self.profile.name}-{self.mode}-{self.scaling}-{self.gpus}gpu"

    def facts(self) -> dict[str, Any]:
        """What sweep.json says of the cell."""
        profile = {"profile": self.profile.name, "engine": self.profile.engine}
        return {**profile, **{key: value for key, value in vars(self).items() if key != "profile"}}


def parse_counts(text: str) -> list[int]:
    """`1,2,4` as process counts. Raises ConfigError for anything else."""
    counts: list[int] = []
    for part in split_list(text, "--gpus"):
        if not (part.isascii() and part.isdecimal() and len(part) < 10 and 1 <= int(part) <= MOST_PROCESSES):
            raise ConfigError(
                f"--gpus {text}: {part!r} is not a process count",
                hint=f"give counts from 1 to {MOST_PROCESSES}: --gpus 1,2,4",
            )
        if int(part) in counts:
            raise ConfigError(f"--gpus {text}: {int(part)} is given twice")
        counts.append(int(part))
    return counts


def parse_names(text: str, option: str, allowed: Sequence[str]) -> list[str]:
    names = split_list(text, option)
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{option} {text}: unknown {name!r}", hint="known: " + ", ".join(allowed))
    return names


def make_cells(
    gpus: Sequence[int],
    profiles: Sequence[str],
    modes: Sequence[str],
    scalings: Sequence[str],
    config: RunConfig,
    *,
    gpus_present: int = 0,
) -> list[Cell]:
    """Every combination, refused as a whole where one cannot run. Modes of a cell stand next to each other.

    gpus_present 0: a machine without GPUs, whose processes may share cores.
    """
    if gpus_present and max(gpus) > gpus_present:  # two processes on one GPU cannot even form an NCCL group
        raise ConfigError(
            f"{max(gpus)} GPUs are asked for, this machine shows {gpus_present}",
            where="--gpus",
            hint="lower the count, or look at CUDA_VISIBLE_DEVICES",
        )
    found = [find_profile(name) for name in profiles]
    cells = []
    for scaling in scalings:
        batches = _batch_sizes(gpus, scaling, config)
        for profile in found:
            for count in gpus:
                _refuse_unfit(profile, count, batches[count], config)
                cells += [Cell(profile, mode, count, scaling, batches[count]) for mode in modes]
    names = [cell.name for cell in cells]
    if len(set(names)) != len(names):
        raise ConfigError("two profiles have the same file name", where="--profiles", hint="rename one of the files")
    return cells


def round_order(cells: Sequence[Cell], round_number: int) -> list[Cell]:
    """Rounds (from 1) run forwards and backwards in turn, so that drift hits every cell alike and can be seen."""
    return list(cells) if round_number % 2 else list(reversed(cells))


def split_list(text: str, option: str) -> list[str]:
    """The parts between commas. Raises ConfigError for none, or for one that stands twice."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"{option} is empty", hint=f"name at least one, separated by commas: {option} a,b")
    duplicates = {part for part in parts if parts.count(part) > 1}
    if duplicates:
        raise ConfigError(f"{option} {text}: {', '.join(sorted(duplicates))} is given twice")
    return parts


def _batch_sizes(gpus: Sequence[int], scaling: str, config: RunConfig) -> dict[int, int]:
    """per_device_batch_size for every count.

    strong: the global batch of the smallest count stays fixed, so the per-device batch shrinks. Raises ConfigError
    for counts that do not divide it.
    """
    batch = config.data.per_device_batch_size
    if scaling == "weak":
        return dict.fromkeys(gpus, batch)
    examples = batch * min(gpus)  # per micro-step over all processes; accumulation stays as it is
    wrong = [count for count in gpus if examples % count]
    if wrong:
        fitting = [str(count) for count in range(min(gpus), MOST_PROCESSES + 1) if examples % count == 0]
        accumulation = config.train.gradient_accumulation_steps
        raise ConfigError(
            f"strong scaling keeps the global batch of {min(gpus)} GPUs: {batch} x {min(gpus)} x accumulation"
            f" {accumulation} = {examples * accumulation}; its {examples} examples per micro-step do not divide over "
            + ", ".join(f"{count} GPUs ({examples}/{count} = {examples / count:.2f})" for count in wrong),
            where="--gpus",
            hint=f"counts that divide: {', '.join(fitting)}; or change data.per_device_batch_size",
        )
    return {count: examples // count for count in gpus}


def _refuse_unfit(profile: Profile, count: int, batch: int, config: RunConfig) -> None:
    """What the worker would refuse after a launch is refused before the first."""
    if profile.deepspeed_path:
        bind_deepspeed(profile.deepspeed_path, config.replace(data__per_device_batch_size=batch), count)
    if profile.engine == "hsdp" and (count < SMALLEST_HSDP or count % 2):
        raise ConfigError(
            f"profile {profile.name} needs an even count of at least {SMALLEST_HSDP}: 2 replicas x shards; got {count}",
            where="--gpus",
        )
