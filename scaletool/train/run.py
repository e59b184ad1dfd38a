"""One training run: put the shared parts together, hand them to a mode, leave a record."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import send_to_device

from scaletool.config import RunConfig
from scaletool.errors import ConfigError, RunError, ScaletoolError
from scaletool.record import (
    CPU_STAMP,
    FAILURE_FILE,
    RECORD_FILE,
    SCHEMA,
    closing_line,
    default_folder,
    failed_record,
    shown,
    write_json,
)
from scaletool.train import cpu_engines, observe
from scaletool.train.data.shards import load_shards
from scaletool.train.data.tokenizer import load_tokenizer
from scaletool.train.export import save_model
from scaletool.train.meter import Meter
from scaletool.train.model import build_model
from scaletool.train.precision import loss_scale, refuse_unfit_gpu, start_loss_scale
from scaletool.train.steps import Plan
from scaletool.train.validate import Validation
from scaletool.train.world import World, bind_engine, cache_folder, own_rank, read_world, world_size

SECONDS_FOR_RANK_0 = 3.0


@dataclass
class Run:
    """Everything a mode needs, built once; `start`, `end_step` and `finish` are the places where it reports."""

    config: RunConfig
    world: World
    plan: Plan
    tokenizer: Any
    model: Any
    loader: Any
    meter: Meter
    validation: Validation | None
    notes: list[str]
    out: Path
    record: dict[str, Any] = field(default_factory=dict)
    accelerator: Any = None
    wrapped: Any = None

    def start(
        self, accelerator: Any, wrapped: torch.nn.Module, *, accumulation: int, max_grad_norm: float | None
    ) -> None:
        """The engine is built: observe it, refuse another run than the one asked for, print the plan.

        Raises RunError(outcome="invalid") on every rank when anything differs.
        """
        self.accelerator, self.wrapped = accelerator, wrapped
        start_loss_scale(accelerator)
        torch.manual_seed(self.config.train.seed + self.world.rank)  # ranks drop out different units
        asked = observe.requested(self.config, self.world, has_gpu=torch.cuda.is_available())
        seen = observe.observed(
            accelerator,
            wrapped,
            mode=self.config.train.mode,
            per_device_batch_size=self.config.data.per_device_batch_size,
            accumulation=accumulation,
            max_grad_norm=max_grad_norm,
        )
        self.record |= {"requested": asked, "observed": seen, "hardware": observe.hardware(accelerator.device)}
        observe.check(asked, seen, self.world)
        if self.world.is_main:
            say(self.describe(seen))

    def end_step(self, grad_norm: Any, learning_rate: Any) -> None:
        """End of an optimizer step, in both modes."""
        self.meter.step(
            grad_norm=grad_norm,
            learning_rate=float(learning_rate),
            loss_scale=loss_scale(self.accelerator, self.wrapped),
            skipped=bool(self.accelerator.optimizer_step_was_skipped),
        )
        if len(self.meter.rows) == self.plan.optimizer_steps:
            self.meter.end_window()
        every = self.config.train.eval_every
        if every and len(self.meter.rows) % every == 0:
            self.validate()

    def batches(self) -> Iterator[dict[str, Any]]:
        """This rank's micro-batches on its device, seen by the meter: what both modes iterate over."""
        for step in self._steps():
            tokens = self._step_target_tokens(step)
            for batch in step:
                yield {
                    **send_to_device(batch, self.accelerator.device, non_blocking=True),
                    "step_target_tokens": tokens,
                }

    def _steps(self) -> Iterator[list[dict[str, Any]]]:
        """Micro-batches by step, as far as their loss needs to know each other."""
        micro_steps = self.plan.gradient_accumulation_steps if self.config.data.streaming else 1
        step: list[dict[str, Any]] = []
        for batch in self.meter.watch(self.loader):
            step.append(batch)
            if len(step) == micro_steps:
                yield step
                step = []

    def _step_target_tokens(self, step: list[dict[str, Any]]) -> Any:
        """Real target tokens of the global batch: known from the lengths of tokenised data, summed for a stream."""
        known = step[0]["info"].micro.step_target_tokens
        if known is not None:
            return known
        own = sum(batch["info"].target_tokens for batch in step)
        total = torch.tensor(own, device=self.accelerator.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.clamp_(min=1)  # of a step whose rows are all bad

    def validate(self) -> None:
        if self.validation is None:
            return
        step = len(self.meter.rows)
        with self.meter.excluded():
            loss = self.validation.loss(self.wrapped, self.accelerator.device)
        self.record.setdefault("validation", []).append({"step": step, "loss": loss})
        if self.world.is_main:
            say(f"step {step:>6}  validation loss {loss:.4f}")

    def finish(self) -> None:
        """The mode has made its last step: close the measurement, write the record and the model."""
        steps, ranks, window = self.meter.finish()
        self.record["data"] |= self.meter.skipped_of_stream()
        if len(steps) != self.plan.optimizer_steps:
            raise RunError(f"planned {self.plan.optimizer_steps} optimizer steps, made {len(steps)}", outcome="invalid")
        if self.validation and not (
            self.record.get("validation") and self.record["validation"][-1]["step"] == len(steps)
        ):
            self.validate()
        self.record |= {
            "steps": steps,
            "ranks": ranks,
            "window": window,
            "outcome": "ok",
            "reason": "",
            "exit_status": 0,
        }
        self.record["memory"] = {"peak_bytes": max(rank["peak_memory_bytes"] for rank in ranks)}
        if not self.config.launch.measured:
            save_model(self.accelerator, self.wrapped, self.tokenizer, self.out / "model")
        if self.world.is_main:
            write_json(self.out / RECORD_FILE, self.record)
            say(f"{closing_line(self.record)}\nrecord: {self.out / RECORD_FILE}")

    def describe(self, seen: dict[str, Any]) -> str:
        """The resolved plan, printed before training in both modes."""
        plan, parameters = self.plan, self.record["plan"]["parameters"]
        kind = "packed rows" if self.config.data.batching == "packed" else "batches"
        grouped = f" in {plan.units} {kind}" if plan.units != plan.rows else ""
        lines = [
            f"{seen['mode']} mode · {seen['engine']} · {seen['world_size']} processes · {seen['precision']}"
            f" · {self.config.model.name}, {parameters:,} parameters",
            f"micro-batch {plan.per_device_batch_size} x accumulation {plan.gradient_accumulation_steps}"
            f" x world {plan.world_size} = global batch {plan.global_batch_size}",
            f"{plan.rows} rows{grouped} = {plan.batches_per_rank} batches per rank"
            f" = {plan.steps_per_epoch} optimizer steps per epoch;"
            f" {plan.optimizer_steps} steps = {plan.epochs:g} epochs",
        ]
        lines += self.notes
        if self.record["stamp"]:
            lines.append(self.record["stamp"])
        return "\n".join(lines)


def build(config: RunConfig, world: World, out: Path) -> Run:
    """Data, plan, model and loader of this rank. Raises ConfigError for data or a model that cannot be used."""
    cache = cache_folder(config)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{cache} cannot be written to: {error}", where="data.cache_dir") from None
    tokenizer = load_tokenizer(config, cache)
    shards = load_shards(config, cache, tokenizer, rank=world.rank, world_size=world.world_size)
    model = build_model(config, tokenizer)
    device = torch.device("cuda", world.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    meter = Meter(
        device,
        log_every=config.train.log_every,
        warmup_steps=config.measure.warmup_steps if config.launch.measured else 0,
        on_log=lambda row: say(_log_line(row, shards.plan.optimizer_steps)) if world.is_main else None,
        samples_path=out / f"samples.rank{world.rank}.jsonl" if config.measure.record_samples else None,
    )
    validation = Validation(shards.validation) if shards.validation is not None else None
    run = Run(config, world, shards.plan, tokenizer, model, shards.loader, meter, validation, shards.notes, out)
    run.record |= {
        "schema": SCHEMA,
        "stamp": None if torch.cuda.is_available() else CPU_STAMP,
        "mode": config.train.mode,
        "config": config.to_dict(),
        "warmup_steps": meter.warmup_steps,
        "versions": observe.versions(),
        "plan": {**shards.plan.to_dict(), "parameters": sum(parameter.numel() for parameter in model.parameters())},
        "data": {"skipped_rows": shards.skipped_rows, "first_skipped": shards.first_skipped},
    }
    return run


def execute(config: RunConfig) -> int:
    """Run to the end, leave a record whatever happens, and return the exit status."""
    _quiet_libraries()
    rank = own_rank()
    out = _open_output_dir(config, rank)
    config = config.replace(train__output_dir=str(out))
    run: Run | None = None
    try:
        world = read_world(config)
        refuse_unfit_gpu(config)
        cpu_engines.enable(world)
        bind_engine(config, world, has_gpu=torch.cuda.is_available())
        run = build(config, world, out)
        if config.train.mode == "custom":
            from scaletool.train.custom_mode import train
        else:
            from scaletool.train.trainer_mode import train
        train(run)
        if dist.is_initialized():
            dist.barrier()
        return 0
    except Exception as error:
        return _fail(error, rank, out, run)


def default_output_dir() -> str:
    """runs/<UTC time>-train; the launcher's start time, so that all its processes name the same folder."""
    launcher = os.getppid() if dist.is_torchelastic_launched() else os.getpid()
    started = Path(f"/proc/{launcher}").stat().st_mtime if Path(f"/proc/{launcher}").exists() else time.time()
    return str(default_folder("train", started))


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _open_output_dir(config: RunConfig, rank: int) -> Path:
    """Make the folder and clear what an earlier run left of the files that would be taken for this one's."""
    out = Path(config.train.output_dir or default_output_dir())
    try:
        out.mkdir(parents=True, exist_ok=True)
        stale = [out / FAILURE_FILE.format(rank=rank), out / f"samples.rank{rank}.jsonl"]
        if rank == 0:
            stale += [
                out / RECORD_FILE,
                *(path for path in out.glob("*.rank*.json*") if _rank_of(path) >= world_size()),
            ]
        for path in stale:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written to: {error}", where="train.output_dir") from None
    return out


def _rank_of(path: Path) -> int:
    number = path.name.split(".rank")[1].split(".")[0]
    return int(number) if number.isdecimal() else -1


def _fail(error: Exception, rank: int, out: Path, run: Run | None) -> int:
    """Record the failure: record.json on rank 0, failure.rank<k>.json on every rank, for the driver to read."""
    expected = isinstance(error, ScaletoolError)
    status = error.exit_status if isinstance(error, ScaletoolError) else 3
    outcome, text = _classify(error), str(error) or type(error).__name__
    trace = None if expected else traceback.format_exc()
    failure = {"outcome": outcome, "reason": text, "rank": rank, "exit_status": status, "traceback": trace}
    write_json(out / FAILURE_FILE.format(rank=rank), failure)
    if rank == 0:
        partial = run.record if run else {}
        fields = {key: value for key, value in partial.items() if key not in ("outcome", "reason")}
        write_json(out / RECORD_FILE, failed_record(outcome, text, **{**fields, "exit_status": status}))
    elif expected:
        # The launcher stops all ranks at the first exit: rank 0 gets the time to say, once, what all ranks found.
        time.sleep(SECONDS_FOR_RANK_0)
    if rank == 0 or not expected or not (out / FAILURE_FILE.format(rank=0)).exists():
        say(f"error: {text}" if expected else f"rank {rank}: {outcome}\n{trace}")
    return status


def _classify(error: Exception) -> str:
    if isinstance(error, RunError):
        return error.outcome
    if isinstance(error, ScaletoolError):
        return "invalid"
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return "oom"
    return "crashed"


def _log_line(row: dict[str, Any], total_steps: int) -> str:
    scale = f"  scale {row['loss_scale']:g}" if row["loss_scale"] is not None else ""
    loss, norm = shown(row["loss"], ".4f"), shown(row["grad_norm"], ".3f")
    return (
        f"step {row['step']:>6}/{total_steps}  loss {loss}  norm {norm}  lr {row['learning_rate']:.2e}"
        f"  {row['seconds'] * 1000:.0f} ms{scale}{'  SKIPPED' if row['skipped'] else ''}"
    )


def _quiet_libraries() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    # T5Block returns views under FSDP2; the losses equal DDP's, so no in-place operation touches them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("torch.distributed").setLevel(logging.WARNING)
