"""Rules over training loops: accelerate's and plain torch's, read as syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule
from scaletool.doctor.rules.names import argument, dotted, keyword, line_of, method, names_in, receiver, shown
from scaletool.doctor.rules.syntax import Script, is_backward, is_optimizer, is_step, script_of

GOOD = """\
import math

import torch
from accelerate import Accelerator
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    T5ForConditionalGeneration,
    get_linear_schedule_with_warmup,
)

EPOCHS, ACCUMULATION = 3, 2


def evaluate(accelerator, model, loader):
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in loader:
            losses.append(accelerator.gather_for_metrics(model(**batch).loss.detach()))
    return torch.stack(losses).mean().item()


def main():
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=ACCUMULATION)
    tokenizer = AutoTokenizer.from_pretrained("t5-small")
    model = T5ForConditionalGeneration.from_pretrained("t5-small", dtype=torch.float32)
    rows = load_from_disk("rows")
    collate = DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8)
    loader = DataLoader(rows["train"], batch_size=8, shuffle=True, collate_fn=collate)
    valid = DataLoader(rows["valid"], batch_size=8, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader, valid = accelerator.prepare(model, optimizer, loader, valid)
    total = EPOCHS * math.ceil(len(loader) / ACCUMULATION)
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, total)
    for epoch in range(EPOCHS):
        model.train()
        for step, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
            if step % 100 == 0:
                accelerator.print(step, loss.item())
        accelerator.print(epoch, evaluate(accelerator, model, valid))
        accelerator.save_state(f"states/{epoch}")
    accelerator.wait_for_everyone()
    accelerator.save_model(model, "out")


main()
"""
STEP = "                optimizer.zero_grad()\n"
AFTER_STEP = "            if step % 100 == 0:\n"

GOOD_TORCH = """\
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(model, rows, epochs):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = DDP(model.cuda(), device_ids=[local_rank])
    sampler = DistributedSampler(rows, shuffle=True)
    loader = DataLoader(rows, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(**{name: value.cuda() for name, value in batch.items()}).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if step % 100 == 0 and dist.get_rank() == 0:
                print(step, loss.item())
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"epoch{epoch}.pt")
        dist.barrier()
"""

SYNCS = {"item": ".item()", "tolist": ".tolist()", "cpu": ".cpu()", "numpy": ".numpy()"}
SYNC_COST = "measured: three .item() with an argmax cost 7% of a step"


def accelerators(script: Script) -> list[ast.Call]:
    return [call for call in script.calls("Accelerator") if script.is_from(call.func, "accelerate", "Accelerator")]


def uses_accelerate(script: Script) -> bool:
    return bool(accelerators(script) or script.accelerator_calls("prepare", "backward"))


def launch_precision(context: Context) -> str | None:
    """The one precision of the accelerate configs in the same call; None where there is none, or they differ."""
    found = {str(document.get("mixed_precision")) for document in context.of("accelerate")}
    return found.pop() if len(found) == 1 else None


def precision(script: Script, context: Context) -> str | None:
    """What the script's Accelerator says, or the launch config beside it; None where that is not known."""
    made = accelerators(script)
    stated = [keyword(call, "mixed_precision") for call in made]
    if any(value is not None for value in stated):
        values = {script.constant(value) for value in stated}
        value = values.pop() if len(values) == 1 else None
        return value if isinstance(value, str) else None
    return launch_precision(context) if uses_accelerate(script) else None


def sharded_engine(script: Script, context: Context) -> str | None:
    """ "FSDP" or "ZeRO-3", where the script or the launch config beside it splits the weights."""
    if script.calls("FullyShardedDataParallelPlugin", "FullyShardedDataParallel", "fully_shard"):
        return "FSDP"
    for call in script.calls("FSDP"):
        if "FullyShardedDataParallel" in script.full(call.func):
            return "FSDP"
    for call in script.calls("DeepSpeedPlugin"):
        if script.constant(keyword(call, "zero_stage")) == 3:
            return "ZeRO-3"
    for call in script.calls("TrainingArguments", "Seq2SeqTrainingArguments"):
        if isinstance(script.constant(keyword(call, "fsdp")), str) and script.constant(keyword(call, "fsdp")):
            return "FSDP"
    for document in context.of("accelerate"):
        if document.get("distributed_type") == "FSDP":
            return "FSDP"
        if document.get("distributed_type") == "DEEPSPEED" and document.get("deepspeed_config.zero_stage") in (3, "3"):
            return "ZeRO-3"
    return None


def uses_deepspeed(script: Script, context: Context) -> bool:
    """Whether an engine of DeepSpeed may run it: it owns clipping, scaling and accumulation."""
    launched = any(document.get("distributed_type") == "DEEPSPEED" for document in context.of("accelerate"))
    return launched or "deepspeed" in script.text.lower()


def unique(problems: Iterator[Problem]) -> Iterator[Problem]:
    """One per line."""
    seen: set[str | int | None] = set()
    for problem in problems:
        if problem.at not in seen:
            seen.add(problem.at)
            yield problem


# --- what runs at every step


@rule(
    "script-sync-every-step",
    "warning",
    "script",
    bad=GOOD.replace(AFTER_STEP, "            history.append(loss.item())\n" + AFTER_STEP),
    good=GOOD,
    link="measured: +7% of a step",
)
def sync_every_step(document: Document, context: Context) -> Iterator[Problem]:
    """.item(), .tolist(), .cpu() and print wait for the GPU; at every step they take away what launches ahead, and
    loops with three of them lost 7% of a step in a measurement."""
    script = script_of(document)
    for loop in script.training_loops if script else ():
        assert script is not None
        found: dict[str, list[int]] = {}
        for node in script.every_step(loop):
            name = method(node)
            if name in SYNCS and isinstance(node, ast.Call) and not node.args and _on_gpu(script, node):
                found.setdefault(SYNCS[name], []).append(line_of(node))
            elif name == "print" and isinstance(node, ast.Call):
                found.setdefault("print", []).append(line_of(node))
        if found:
            lines = sorted({line for places in found.values() for line in places})
            yield Problem(
                lines[0],
                f"{' and '.join(sorted(found))} at every step of the training loop "
                f"(line {', '.join(map(str, lines))}): each waits for the GPU ({SYNC_COST})",
                "sum up loss.detach() on the GPU, and read and print it every n steps",
            )


def _on_gpu(script: Script, call: ast.Call) -> bool:
    """Not where it is plain that numbers of the host are meant."""
    inner = receiver(call)
    calls = {method(each) for each in ast.walk(inner) if isinstance(each, ast.Call)} if inner is not None else set()
    return not calls & {"array", "asarray", "numpy", "cpu", "tolist"} and "np" not in (names_in(inner) if inner else ())


@rule(
    "script-barrier-every-step",
    "warning",
    "script",
    bad=GOOD.replace(AFTER_STEP, "            accelerator.wait_for_everyone()\n" + AFTER_STEP),
    good=GOOD,
    link="measured: 0.13 to 0.3 ms per barrier",
)
def barrier_every_step(document: Document, context: Context) -> Iterator[Problem]:
    """The gradients' all-reduce already keeps the processes together; a barrier at every step adds 0.1 to 0.3 ms and
    takes away all overlap."""
    script = script_of(document)
    for loop in script.training_loops if script else ():
        assert script is not None
        lines = sorted(
            line_of(node)
            for node in script.every_step(loop)
            if isinstance(node, ast.Call)
            and script.called(node) in ("wait_for_everyone", "barrier", "monitored_barrier")
        )
        if lines:
            yield Problem(
                lines[0],
                "a barrier (wait_for_everyone) after every step of the training loop: 0.1 to 0.3 ms each (measured), "
                "and every rank waits for the slowest",
                "delete it: backward already synchronises; wait before saving only",
            )


@rule(
    "script-argmax-every-step",
    "warning",
    "script",
    bad=GOOD.replace(AFTER_STEP, "            hits += model(**batch).logits.argmax(dim=-1).sum()\n" + AFTER_STEP),
    good=GOOD,
    link="measured: logits of [8, 512, 32128] are 526 MB",
)
def argmax_every_step(document: Document, context: Context) -> Iterator[Problem]:
    """An argmax over all logits reads hundreds of megabytes again at every step (526 MB in float32 for 8 x 512 tokens
    of T5's 32,128 words)."""
    script = script_of(document)
    for loop in script.training_loops if script else ():
        assert script is not None
        for node in script.every_step(loop):
            if isinstance(node, ast.Call) and method(node) == "argmax":
                over = receiver(node) if dotted(receiver(node)) not in ("torch", "np", "numpy") else None
                over = over if over is not None else argument(node, 0, "input")
                if over is not None and "logits" in names_in(over):
                    yield Problem(
                        line_of(node),
                        f"argmax over the full logits ({shown(node)}) at every step of the training loop: 526 MB to "
                        "read for 8 x 512 tokens of 32,128 words",
                        "take the accuracy every n steps, or in the evaluation only",
                    )


@rule(
    "script-save-every-step",
    "warning",
    "script",
    bad=GOOD.replace(AFTER_STEP, '            accelerator.save_state("last")\n' + AFTER_STEP),
    good=GOOD,
)
def save_every_step(document: Document, context: Context) -> Iterator[Problem]:
    """A checkpoint at every step writes the weights, and twice that of optimizer state, each time."""
    script = script_of(document)
    for loop in script.training_loops if script else ():
        assert script is not None
        for node in script.every_step(loop):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            saves = node.func.attr in ("save_pretrained", "save_state", "save_model", "save_checkpoint")
            if saves or script.full(node.func) == "torch.save":
                yield Problem(
                    line_of(node),
                    f"{shown(node.func)} runs at every step of the training loop",
                    "save every n steps: if step % 1000 == 0",
                )


# --- gradients


def _is_one_device(script: Script, node: ast.expr, depth: int = 0) -> bool:
    """Whether it is the first GPU, by number."""
    for origin in script.origins(node):
        value = origin.node
        if isinstance(value, ast.Call) and script.full(value.func) == "torch.device" and value.args and depth < 3:
            return _is_one_device(script, value.args[0], depth + 1)
        if isinstance(value, ast.Constant) and value.value == "cuda:0":
            return True
    return False


@rule(
    "script-one-device",
    "error",
    "script",
    bad=GOOD.replace("model(**batch).loss\n", 'model(**batch.to("cuda:0")).loss\n', 1).replace(
        "                loss = model(**batch).loss\n", '                loss = model(**batch.to("cuda:0")).loss\n'
    ),
    good=GOOD,
)
def one_device(document: Document, context: Context) -> Iterator[Problem]:
    """cuda:0 is the first GPU on every rank: all processes would meet there."""
    script = script_of(document)
    if script is None or not (uses_accelerate(script) or script.calls("init_process_group")):
        return
    for loop in script.training_loops:
        for node in script.inside(loop.root.body):
            if (
                isinstance(node, ast.Call)
                and method(node) == "to"
                and node.args
                and _is_one_device(script, node.args[0])
            ):
                yield Problem(
                    line_of(node),
                    f'{shown(node)}: "cuda:0" is the same GPU for every process',
                    "use accelerator.device, or the GPU of LOCAL_RANK",
                )


@rule(
    "script-accumulate-missing",
    "error",
    "script",
    bad=GOOD.replace("accelerator.accumulate(model)", "accelerator.autocast()"),
    good=GOOD,
    link="accelerate 1.15.0 divides in backward (source)",
)
def accumulate_missing(document: Document, context: Context) -> Iterator[Problem]:
    """Accelerator(gradient_accumulation_steps=n) makes backward divide the loss by n; without `accumulate` every
    micro-batch steps all the same, with 1/n of its gradient."""
    script = script_of(document)
    if script is None or script.calls("accumulate", "no_sync") or uses_deepspeed(script, context):
        return
    for call in accelerators(script):
        steps = keyword(call, "gradient_accumulation_steps")
        plugin = keyword(call, "gradient_accumulation_plugin")
        if steps is None and plugin is not None:
            steps = next((argument(each, 0, "num_steps") for each in script.calls("GradientAccumulationPlugin")), None)
        if steps is None or script.constant(steps) == 1:
            continue
        for loop in script.training_loops:
            nodes = list(script.every_step(loop))
            stepping = {script.loop_of(node) for node in nodes if is_step(node)}
            if stepping & {script.loop_of(node) for node in nodes if _by_accelerator(script, node)}:
                yield Problem(
                    line_of(call),
                    f"gradient_accumulation_steps={shown(steps)}, but the loop at line {line_of(loop.node)} has no "
                    "accelerator.accumulate: every batch steps, with its gradient divided by that number",
                    "put the step into `with accelerator.accumulate(model):`",
                )
                break


def _by_accelerator(script: Script, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and is_backward(node) and script.is_accelerator(receiver(node))


@rule(
    "script-loss-divided-twice",
    "error",
    "script",
    bad=GOOD.replace("accelerator.backward(loss)", "accelerator.backward(loss / ACCUMULATION)"),
    good=GOOD,
    link="accelerate 1.15.0 divides in backward (source)",
)
def divided_twice(document: Document, context: Context) -> Iterator[Problem]:
    """accelerator.backward already divides the loss by gradient_accumulation_steps; divided once more, the gradient is
    that many times too small."""
    script = script_of(document)
    if script is None:
        return
    stated = [keyword(call, "gradient_accumulation_steps") for call in accelerators(script)]
    texts = {shown(value) for value in stated if value is not None and script.constant(value) != 1}
    for loop in script.training_loops if texts else ():
        for node in script.inside(loop.root.body):
            if not _by_accelerator(script, node) or not isinstance(node, ast.Call) or not node.args:
                continue
            for origin in script.origins(node.args[0]):
                divided = origin.node
                if isinstance(divided, ast.BinOp) and isinstance(divided.op, ast.Div):
                    if shown(divided.right) in texts or "gradient_accumulation_steps" in names_in(divided.right):
                        yield Problem(
                            line_of(divided),
                            f"the loss is divided by {shown(divided.right)} here, and once more in "
                            "accelerator.backward",
                            "delete the division",
                        )


@rule(
    "script-zero-grad-between",
    "error",
    "script",
    bad=GOOD.replace(STEP, "").replace(
        "                optimizer.step()\n",
        "                optimizer.zero_grad()\n                optimizer.step()\n",
    ),
    good=GOOD,
)
def zero_grad_between(document: Document, context: Context) -> Iterator[Problem]:
    """zero_grad between backward and step throws the gradient away: the step applies nothing but weight decay."""
    script = script_of(document)
    for loop in script.training_loops if script else ():
        assert script is not None
        calls = [node for node in script.inside(loop.root.body) if isinstance(node, ast.Call)]
        calls = sorted(calls, key=lambda call: (line_of(call), call.col_offset))
        last: str | None = None  # of backward, step
        for position, call in enumerate(calls):
            if is_backward(call):
                last = "backward"
            elif is_step(call):
                last = "step"
            elif method(call) == "zero_grad" and last == "backward" and not script.is_guarded(call, loop.root):
                later = [each for each in calls[position + 1 :] if is_backward(each) or is_step(each)]
                name = dotted(receiver(call))
                if later and is_step(later[0]) and name and _steps(later[0], name):
                    yield Problem(
                        line_of(call),
                        f"{shown(call)} stands between backward and step: the step gets no gradient",
                        "move it after the step, or before backward",
                    )
                break


def _steps(call: ast.Call, optimizer: str) -> bool:
    return optimizer in (dotted(receiver(call)), *(dotted(each) for each in call.args))


@rule("script-zero-grad-missing", "error", "script", bad=GOOD.replace(STEP, ""), good=GOOD)
def zero_grad_missing(document: Document, context: Context) -> Iterator[Problem]:
    """Without zero_grad every step adds its gradient to those of all steps before."""
    script = script_of(document)
    if script is None or "zero_grad" in script.text or uses_deepspeed(script, context):
        return
    if any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in script.nodes):
        return
    for loop in script.training_loops:
        for node in script.inside(loop.root.body):
            if isinstance(node, ast.Call) and is_step(node) and is_optimizer(receiver(node)):
                yield Problem(
                    line_of(node),
                    f"{shown(node)} in a loop without zero_grad: gradients of all steps add up",
                    f"call {shown(receiver(node))}.zero_grad() after the step",
                )
                break


@rule(
    "script-backward-of-loss",
    "error",
    "script",
    bad=GOOD.replace("accelerator.backward(loss)", "loss.backward()"),
    good=GOOD,
    link="accelerate 1.15.0 scales in backward (source)",
)
def backward_of_loss(document: Document, context: Context) -> Iterator[Problem]:
    """loss.backward() passes accelerate by: nothing scales the loss for fp16, and nothing divides it for
    accumulation."""
    script = script_of(document)
    if script is None or not script.accelerator_calls("prepare"):
        return
    known = precision(script, context)
    if known in ("no", "bf16"):
        return
    for loop in script.training_loops:
        for node in script.inside(loop.root.body):
            if not isinstance(node, ast.Call) or not is_backward(node) or _by_accelerator(script, node):
                continue
            if "loss" in dotted(receiver(node)).lower():
                told = "the precision is fp16 and " if known == "fp16" else ""
                yield Problem(
                    line_of(node),
                    f"{shown(node)} in a loop with accelerate: {told}the loss is not scaled for fp16, and not divided "
                    "for accumulation",
                    f"write accelerator.backward({shown(receiver(node))})",
                    severity="error" if known == "fp16" else "warning",
                )


@rule(
    "script-clip-scaled-gradients",
    "error",
    "script",
    bad=GOOD.replace("accelerator.clip_grad_norm_", "torch.nn.utils.clip_grad_norm_"),
    good=GOOD,
    link="accelerate 1.15.0: clip_grad_norm_ unscales first (source)",
)
def clip_scaled(document: Document, context: Context) -> Iterator[Problem]:
    """Under fp16 the gradients carry the loss scale (65,536 at first) until they are unscaled: clipping them at 1.0
    before that makes every step tiny. Sharded gradients are not whole on one rank, so a plain norm is wrong there."""
    script = script_of(document)
    if script is None or script.calls("unscale_", "unscale_gradients"):
        return
    engine = sharded_engine(script, context)
    native = bool(script.calls("GradScaler")) and bool(script.calls("scale"))
    scaled = native or precision(script, context) == "fp16"
    if not scaled and engine is None:
        return
    for loop in script.training_loops:
        for node in script.inside(loop.root.body):
            if not isinstance(node, ast.Call) or script.called(node) not in ("clip_grad_norm_", "clip_grad_value_"):
                continue
            owner = script.full(node.func).rpartition(".")[0]
            if owner not in ("", "torch.nn.utils", "nn.utils", "torch.nn.utils.clip_grad"):
                continue
            why = "gradients still carry the fp16 loss scale" if scaled else f"{engine} splits the gradients"
            own = "scaler.unscale_(optimizer) before it" if native else "accelerator.clip_grad_norm_(...)"
            yield Problem(
                line_of(node), f"{shown(node.func)}: the {why}, so the norm is not the true one", f"use {own}"
            )


@rule(
    "script-gathered-logits",
    "warning",
    "script",
    bad=GOOD.replace("model(**batch).loss.detach()", "model(**batch).logits.detach()"),
    good=GOOD,
    link="measured: 118.7 ms against 9.4 ms for [4, 64, 32128]",
)
def gathered_logits(document: Document, context: Context) -> Iterator[Problem]:
    """Gathering T5's logits sends 32,128 numbers per word; the ids are one. Measured for [4, 64, 32128]: 118.7 ms with
    the logits, 9.4 ms with the argmax first."""
    script = script_of(document)
    if script is None or "t5" not in script.text.lower() or "Classification" in script.text:
        return
    for call in script.accelerator_calls("gather", "gather_for_metrics"):
        for origin in script.origins(argument(call, 0, "tensor", "input_data")):
            parts = origin.node.elts if isinstance(origin.node, ast.Tuple | ast.List) else [origin.node]
            if any(_are_logits(part) for part in parts):
                yield Problem(
                    line_of(call),
                    f"{shown(call)} sends all logits to all ranks: 12.7 times as long as the ids (measured)",
                    "take .argmax(-1) first, and gather that",
                )


def _are_logits(node: ast.expr) -> bool:
    while isinstance(node, ast.Call) and method(node) in ("detach", "float", "contiguous", "cpu"):
        inner = receiver(node)
        if inner is None:
            return False
        node = inner
    return isinstance(node, ast.Attribute) and node.attr == "logits"


REMOVED_FROM_ACCELERATOR = {
    "dispatch_batches": "give dataloader_config=DataLoaderConfiguration(dispatch_batches=...)",
    "even_batches": "give dataloader_config=DataLoaderConfiguration(even_batches=...)",
    "use_seedable_sampler": "give dataloader_config=DataLoaderConfiguration(use_seedable_sampler=...)",
    "logging_dir": "write project_dir",
    "fp16": 'write mixed_precision="fp16"',
    "downcast_bf16": "delete it",
    "gradient_clipping": "delete it, and call accelerator.clip_grad_norm_ in the loop",
}


@rule(
    "script-accelerator-arguments",
    "error",
    "script",
    bad=GOOD.replace('mixed_precision="fp16"', "fp16=True"),
    good=GOOD,
    link="TypeError in accelerate 1.15.0",
)
def accelerator_arguments(document: Document, context: Context) -> Iterator[Problem]:
    """Arguments that older releases of accelerate took end in a TypeError when the Accelerator is made."""
    script = script_of(document)
    for call in accelerators(script) if script else ():
        for each in call.keywords:
            if each.arg in REMOVED_FROM_ACCELERATOR:
                what = f"Accelerator has no argument {each.arg} in accelerate 1.15"
                yield Problem(line_of(each), what, REMOVED_FROM_ACCELERATOR[each.arg])
