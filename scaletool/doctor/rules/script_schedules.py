"""Rules over learning-rate schedules in training loops, read as syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule
from scaletool.doctor.rules.names import argument, dotted, keyword, line_of, method, receiver, shown
from scaletool.doctor.rules.script import GOOD, accelerators, uses_accelerate
from scaletool.doctor.rules.syntax import Growth, Script, TrainingLoop, is_step, script_of

SCHEDULES = {
    "get_scheduler", "get_linear_schedule_with_warmup", "get_cosine_schedule_with_warmup",
    "get_cosine_with_hard_restarts_schedule_with_warmup", "get_polynomial_decay_schedule_with_warmup",
    "get_constant_schedule", "get_constant_schedule_with_warmup", "get_inverse_sqrt_schedule", "get_wsd_schedule",
    "LambdaLR", "LinearLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "OneCycleLR", "PolynomialLR",
    "SequentialLR", "StepLR", "MultiStepLR", "ExponentialLR", "ConstantLR",
}  # fmt: skip
TOTALS = ("num_training_steps", "total_steps", "T_max", "total_iters", "steps_per_epoch", "step_size")


def schedules(script: Script) -> list[ast.Call]:
    """Calls that make a learning-rate schedule which changes over the steps."""
    found = []
    for call in script.calls(*SCHEDULES):
        name = script.called(call)
        kind = script.constant(argument(call, 0, "name")) if name == "get_scheduler" else None
        constant = name in ("get_constant_schedule", "ConstantLR") or kind == "constant"
        if not constant and not script.full(call.func).startswith("local."):
            found.append(call)
    return found


def total_of(script: Script, schedule: ast.Call) -> ast.expr | None:
    """The argument that says after how many steps it ends."""
    named = keyword(schedule, *TOTALS)
    positions = {"get_scheduler": 3, "CosineAnnealingLR": 1, "OneCycleLR": 2, "LinearLR": 3, "PolynomialLR": 1}
    name = script.called(schedule)
    position = positions.get(name, 2 if name.startswith("get_") and "constant" not in name else None)
    return named if named is not None or position is None else argument(schedule, position)


class Prepared:
    """What goes through `accelerator.prepare`, as far as it can be seen."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls = script.accelerator_calls("prepare", "prepare_scheduler", "prepare_data_loader")
        self.all_seen = True
        self.origins: dict[ast.expr, ast.expr] = {}
        for call in self.calls:
            for value in call.args:
                if isinstance(value, ast.Starred):
                    self.all_seen = False
                    continue
                for origin in script.origins(value):
                    self.origins[origin.node] = value
                    if isinstance(origin.node, ast.Name | ast.Attribute):
                        self.all_seen = False

    def line_of(self, made: ast.expr) -> int | None:
        """Where what `made` makes is prepared."""
        value = self.origins.get(made)
        return None if value is None else line_of(value)

    def loader_before(self, node: ast.Call) -> bool | None:
        """Whether the loader in len(loader) is prepared at that place; None where it never is."""
        for origin in self.script.origins(node.args[0]):
            prepared = self.line_of(origin.node)
            if prepared is not None:
                same = self.script.function_of(self.origins[origin.node]) is self.script.function_of(node)
                return prepared < line_of(node) if same else True
        return None


def steps_once(script: Script) -> bool:
    """Whether a prepared schedule may step once per step, as options can have it."""
    calls = script.calls("Accelerator", "DataLoaderConfiguration")
    options = [keyword(call, name) for call in calls for name in ("split_batches", "step_scheduler_with_optimizer")]
    return any(option is not None for option in options)


def lengths(script: Script, node: ast.expr | None) -> list[ast.Call]:
    """The len(...) calls that an expression comes from."""
    found: list[ast.Call] = []
    open_nodes = [node] if node is not None else []
    seen: set[ast.AST] = set()
    while open_nodes and len(seen) < 200:
        current = open_nodes.pop()
        if current in seen:
            continue
        seen.add(current)
        for origin in script.origins(current):
            for each in ast.walk(origin.node):
                if isinstance(each, ast.Call) and dotted(each.func) == "len" and each.args:
                    found.append(each)
                elif isinstance(each, ast.Name | ast.Attribute) and each is not current:
                    open_nodes.append(each)
    return found


@rule(
    "script-scheduler-prepared",
    "error",
    "script",
    bad=GOOD.replace("100, total)", "100, total)\n    scheduler = accelerator.prepare(scheduler)"),
    good=GOOD,
    link="huggingface/accelerate#2926",
)
def scheduler_prepared(document: Document, context: Context) -> Iterator[Problem]:
    """A scheduler that went through accelerator.prepare steps once per process at each optimizer step: with 4 processes
    a schedule over 60 steps has reached its end after 15 (measured)."""
    script = script_of(document)
    if script is None or steps_once(script):
        return
    prepared = Prepared(script)
    for schedule in schedules(script):
        line = prepared.line_of(schedule)
        total = total_of(script, schedule)
        if line is None or _counts_all_ranks(script, prepared, schedule, total):
            continue
        told = f"its total ({shown(total)}) is not" if total is not None else "its steps are not"
        yield Problem(
            line,
            f"scheduler {script.called(schedule)} goes through accelerator.prepare, which steps it once per process, "
            f"and {told} multiplied by the number of processes: on {max(context.counts)} GPUs it ends after "
            f"1/{max(context.counts)} of the run",
            "leave the scheduler out of prepare and step it once per optimizer step, or multiply its steps by "
            "accelerator.num_processes",
        )


def _counts_all_ranks(script: Script, prepared: Prepared, schedule: ast.Call, total: ast.expr | None) -> bool:
    if total is None:
        function = script.function_of(schedule)
        held = ast.walk(function if function is not None else schedule)
        return any(isinstance(each, ast.expr) and script.is_world(each) for each in held)
    growth = script.growth(total)
    if growth.high >= 1 or growth.remultiplied:
        return True
    if growth.low < 0:
        return False
    found = lengths(script, total)
    return bool(found) and not any(prepared.loader_before(each) for each in found)


@rule(
    "script-scheduler-total-before-prepare",
    "error",
    "script",
    bad=GOOD.replace(
        "    model, optimizer, loader, valid = accelerator.prepare(model, optimizer, loader, valid)\n"
        "    total = EPOCHS * math.ceil(len(loader) / ACCUMULATION)\n",
        "    total = EPOCHS * math.ceil(len(loader) / ACCUMULATION)\n"
        "    model, optimizer, loader, valid = accelerator.prepare(model, optimizer, loader, valid)\n",
    ),
    good=GOOD,
    link="huggingface/accelerate#1398",
)
def total_before_prepare(document: Document, context: Context) -> Iterator[Problem]:
    """len(loader) counts the batches of all processes before accelerator.prepare, and those of one process after it: a
    schedule over the first that steps once per step never comes to its end."""
    script = script_of(document)
    if script is None or steps_once(script):
        return
    prepared = Prepared(script)
    for schedule in schedules(script):
        total = total_of(script, schedule)
        if total is None or not prepared.all_seen or prepared.line_of(schedule) is not None:
            continue
        if script.growth(total) != Growth(bases=script.growth(total).bases, divisors=script.growth(total).divisors):
            continue
        for each in lengths(script, total):
            if prepared.loader_before(each) is False:
                yield Problem(
                    line_of(each),
                    f"{shown(each)} is taken before accelerator.prepare, so it counts the batches of all processes, "
                    f"and scheduler {script.called(schedule)} steps once per step of one: it stops at 1/number of "
                    "processes of its way",
                    "take the length after accelerator.prepare",
                )
                break


@rule(
    "script-scheduler-steps-times-world",
    "error",
    "script",
    bad=GOOD.replace("100, total)", "100, total * accelerator.num_processes)"),
    good=GOOD,
    link="huggingface/accelerate#1398",
)
def scheduler_times_world(document: Document, context: Context) -> Iterator[Problem]:
    """A schedule that is not prepared counts optimizer steps; multiplied by the number of processes it comes only to a
    part of its way."""
    script = script_of(document)
    if script is None:
        return
    prepared = Prepared(script)
    for schedule in schedules(script):
        total = total_of(script, schedule)
        growth = script.growth(total)
        again = growth.low >= 1 or (growth.remultiplied and growth.low >= 0)
        if total is not None and again and prepared.all_seen and prepared.line_of(schedule) is None:
            if not uses_accelerate(script) and not script.training_loops:
                continue
            yield Problem(
                line_of(total),
                f"the steps of {script.called(schedule)} ({shown(total)}) are multiplied by the number of processes, "
                "but the scheduler is not prepared: it steps once per optimizer step",
                "drop the factor",
            )


@rule(
    "script-scheduler-per-micro-batch",
    "error",
    "script",
    bad=GOOD.replace(
        "            if accelerator.sync_gradients:\n                scheduler.step()", "            scheduler.step()"
    ),
    good=GOOD,
    link="measured with accelerate 1.15.0",
)
def scheduler_per_micro_batch(document: Document, context: Context) -> Iterator[Problem]:
    """A schedule counted in optimizer steps but stepped at every micro-batch ends after 1/accumulation of the run."""
    script = script_of(document)
    if script is None:
        return
    prepared = Prepared(script)
    for loop in script.training_loops:
        accumulation = _accumulation(script, loop)
        if accumulation is None:
            continue
        for call in script.every_step(loop):
            if not isinstance(call, ast.Call) or method(call) != "step" or is_step(call):
                continue
            for origin in script.origins(receiver(call)):
                made = origin.node
                if (
                    not isinstance(made, ast.Call)
                    or made not in schedules(script)
                    or prepared.line_of(made) is not None
                ):
                    continue
                if accumulation & script.growth(total_of(script, made)).divisors:
                    yield Problem(
                        line_of(call),
                        f"the scheduler steps at every micro-batch, its total ({shown(total_of(script, made))}) counts "
                        f"optimizer steps, one per {', '.join(sorted(accumulation))} micro-batches",
                        "step it only where the optimizer steps: if accelerator.sync_gradients: scheduler.step()",
                    )


def _accumulation(script: Script, loop: TrainingLoop) -> frozenset[str] | None:
    """As written, by how many micro-batches the loop accumulates; None where it does not, or that is not seen."""
    values = [keyword(call, "gradient_accumulation_steps") for call in accelerators(script)]
    if any(method(node) == "accumulate" for node in script.inside(loop.root.body)):
        known = [value for value in values if value is not None and script.constant(value) != 1]
        return frozenset().union(*(script.growth(value).bases | {shown(value)} for value in known)) if known else None
    if any(is_step(node) and not script.is_guarded(node, loop.root) for node in script.inside(loop.root.body)):
        return None
    for node in script.inside(loop.root.body):
        if isinstance(node, ast.If) and any(is_step(each) for each in script.inside(node.body)):
            for each in ast.walk(node.test):
                if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod):
                    return script.growth(each.right).bases | {shown(each.right)}
    return None
