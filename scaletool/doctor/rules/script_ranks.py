"""Rules over what runs on which rank in training scripts, read as syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule
from scaletool.doctor.rules.names import argument, dotted, keyword, line_of, method, receiver, shown
from scaletool.doctor.rules.script import (
    AFTER_STEP,
    GOOD,
    GOOD_TORCH,
    sharded_engine,
    unique,
    uses_accelerate,
    uses_deepspeed,
)
from scaletool.doctor.rules.syntax import Script, is_backward, script_of

COLLECTIVES = {"gather", "gather_for_metrics", "reduce", "wait_for_everyone", "pad_across_processes"}


@rule(
    "script-collective-on-one-rank",
    "error",
    "script",
    bad=GOOD.replace(AFTER_STEP, "            if accelerator.is_main_process and step % 100 == 0:\n").replace(
        "step, loss.item()", "step, accelerator.gather(loss).mean().item()"
    ),
    good=GOOD,
)
def collective_on_one_rank(document: Document, context: Context) -> Iterator[Problem]:
    """Collective calls wait for all processes: behind a test for the main process the run hangs until its time
    limit."""
    script = script_of(document)
    if script is None:
        return
    for call in script.calls(*COLLECTIVES, "all_reduce", "all_gather"):
        owner = dotted(receiver(call))
        if not (script.is_accelerator(receiver(call)) or script.full(call.func).startswith("torch.distributed.")):
            continue
        test = script.on_main_only(call)
        if test is None or test.orelse:
            continue
        function = script.function_of(call)
        others = [each for each in script.calls(script.called(call)) if script.function_of(each) is function]
        if script.called(call) == "wait_for_everyone" and len(others) > 1:
            continue  # the others may wait in a branch of their own
        yield Problem(
            line_of(call),
            f"{owner}.{script.called(call)} waits for all processes, but only the main one comes here "
            f"(if {shown(test.test)}): the run hangs",
            "move it out of the condition",
        )


@rule(
    "script-sharded-save",
    "error",
    "script",
    bad=GOOD.replace("Accelerator(", "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), ").replace(
        '    accelerator.save_model(model, "out")\n',
        "    if accelerator.is_main_process:\n"
        '        torch.save(accelerator.unwrap_model(model).state_dict(), "out.pt")\n',
    ),
    good=GOOD,
    link="accelerate 1.15.0: get_state_dict is a collective call (source)",
)
def sharded_save(document: Document, context: Context) -> Iterator[Problem]:
    """Under FSDP and ZeRO-3 no rank holds the whole weights: collecting them needs all ranks. On rank 0 alone it hangs,
    or saves a shard."""
    script = script_of(document)
    engine = sharded_engine(script, context) if script else None
    if script is None or engine is None:
        return

    def found() -> Iterator[Problem]:
        for call in script.calls("state_dict", "get_state_dict", "save_pretrained", "save_model", "save_state"):
            name = method(call)
            model_like = name != "state_dict" or _is_model(script, receiver(call))
            if not isinstance(call.func, ast.Attribute) or not model_like or _is_tokenizer(receiver(call)):
                continue
            given = keyword(call, "state_dict")
            test = script.on_main_only(call)
            if test is not None and (name != "save_pretrained" or given is None):
                yield Problem(
                    line_of(call),
                    f"{name} runs on rank 0 only (if {shown(test.test)}), but {engine} splits the weights over all "
                    "ranks: it hangs or saves a shard",
                    "call accelerator.get_state_dict(model) on all ranks, and let only the writing be rank 0's "
                    "(save_pretrained(..., is_main_process=accelerator.is_main_process, state_dict=...))",
                )
            elif name == "save_pretrained" and given is None and keyword(call, "is_main_process") is not None:
                yield Problem(
                    line_of(call),
                    f"save_pretrained has no state_dict, and {engine} splits the weights over all ranks: the shards of "
                    "one rank are saved",
                    "add state_dict=accelerator.get_state_dict(model)",
                )

    yield from unique(found())


def _is_model(script: Script, node: ast.expr | None) -> bool:
    text = shown(node).lower()
    return not any(word in text for word in ("optim", "sched", "scaler", "sampler", "loader", "lora", "adapter"))


def _is_tokenizer(node: ast.expr | None) -> bool:
    last = dotted(node).rpartition(".")[2].lower()
    return any(word in last for word in ("tok", "processor", "config", "processing_class"))


WRAPPED = {"generate", "save_pretrained", "config", "resize_token_embeddings", "get_input_embeddings"}


@rule(
    "script-wrapped-model-attribute",
    "error",
    "script",
    bad=GOOD.replace('accelerator.save_model(model, "out")', 'model.save_pretrained("out")'),
    good=GOOD,
    link="AttributeError: 'DistributedDataParallel' object has no attribute",
)
def wrapped_attribute(document: Document, context: Context) -> Iterator[Problem]:
    """After accelerator.prepare the model is a DistributedDataParallel as soon as there are 2 processes: it has no
    generate, config or save_pretrained of its own."""
    script = script_of(document)
    if script is None or uses_deepspeed(script, context) or sharded_engine(script, context):
        return
    models: dict[tuple[ast.AST, str], int] = {}
    for call in script.accelerator_calls("prepare", "prepare_model"):
        statement = script.parents.get(call)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Name) and each.id in ("model", "net"):
                    models[script.scopes[each], each.id] = line_of(call)
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and node.attr in WRAPPED and isinstance(node.value, ast.Name):
            mark = (script.scopes[node], node.value.id)
            if mark in models and line_of(node) > models[mark] and len(script.bindings[mark]) <= 2:
                yield Problem(
                    line_of(node),
                    f"{shown(node)} after prepare: with 2 or more processes {node.value.id} is a "
                    f"DistributedDataParallel, which has no {node.attr}",
                    f"write accelerator.unwrap_model({node.value.id}).{node.attr}",
                )


@rule(
    "script-broadcast-objects",
    "warning",
    "script",
    bad=GOOD.replace("    optimizer = torch", "    model = broadcast_object_list([model])[0]\n    optimizer = torch"),
    good=GOOD,
    link="accelerate 1.15.0: objects go as pickles (source)",
)
def broadcast_objects(document: Document, context: Context) -> Iterator[Problem]:
    """broadcast_object_list pickles: a model or dataset is copied to bytes, sent, and built again on every rank, slower
    than reading it from disk there, and on rank 0 it takes memory twice."""
    script = script_of(document)
    if script is None:
        return
    found: dict[str, int] = {}
    for call in script.calls("broadcast_object_list"):
        for name in _broadcast(script, call):
            found.setdefault(name, line_of(call))
    if found:
        yield Problem(
            min(found.values()),
            f"{', '.join(found)} go to the other ranks as pickles (broadcast_object_list)",
            "load them on every rank; `with accelerator.main_process_first():` lets the first one fill the caches",
        )


def _broadcast(script: Script, call: ast.Call) -> Iterator[str]:
    value = argument(call, 0, "object_list")
    lists = [value] if isinstance(value, ast.List) else []
    if isinstance(value, ast.Name):
        scope = script.scopes[value]
        lists = [each.value for each in script.bindings.get((scope, value.id), ()) if isinstance(each.value, ast.List)]
    for each in lists:
        for item in each.elts if isinstance(each, ast.List) else ():
            name = dotted(item)
            if name and _is_heavy(script, item, name.rpartition(".")[2].lower()):
                yield name


def _is_heavy(script: Script, item: ast.expr, name: str) -> bool:
    origins = [each.node for each in script.origins(item)]
    if any(isinstance(each, ast.Constant) and each.value is not None for each in origins):
        return False
    makers = {"from_pretrained", "from_config", "load_dataset", "load_from_disk", "from_generator", "map", "from_list"}
    if any(isinstance(each, ast.Call) and script.called(each) in makers for each in origins):
        return True
    return name.split("_")[-1] in ("model", "net", "tokenizer", "dataset", "data", "rows")


@rule(
    "script-visible-devices",
    "warning",
    "script",
    bad=GOOD.replace("import torch\n", 'import os\n\nimport torch\n\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n', 1),
    good=GOOD,
)
def visible_devices(document: Document, context: Context) -> Iterator[Problem]:
    """CUDA_VISIBLE_DEVICES set to one GPU inside the script holds for every process: with more processes than GPUs seen
    they end with "invalid device ordinal", or share the one."""
    script = script_of(document)
    if script is None or not (
        uses_accelerate(script) or script.calls("Trainer", "Seq2SeqTrainer", "init_process_group")
    ):
        return
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Subscript):
            continue
        target, value = node.targets[0], script.constant(node.value)
        key = target.slice.value if isinstance(target.slice, ast.Constant) else None
        if key == "CUDA_VISIBLE_DEVICES" and isinstance(value, str) and value.strip().isdecimal():
            yield Problem(
                line_of(node),
                f"CUDA_VISIBLE_DEVICES={value}: every process sees the same single GPU",
                "delete it, and choose GPUs where the job is launched",
            )


@rule(
    "script-data-parallel",
    "warning",
    "script",
    bad=GOOD_TORCH.replace("DDP(model.cuda(), device_ids=[local_rank])", "torch.nn.DataParallel(model.cuda())"),
    good=GOOD_TORCH,
    link="torch's documentation of DataParallel",
)
def data_parallel(document: Document, context: Context) -> Iterator[Problem]:
    """DataParallel drives all GPUs from one process and copies the model at every step; DistributedDataParallel does
    not."""
    script = script_of(document)
    for call in script.calls("DataParallel") if script else ():
        assert script is not None
        if script.full(call.func) in ("DataParallel", "nn.DataParallel", "torch.nn.DataParallel"):
            yield Problem(
                line_of(call),
                "DataParallel: one process for all GPUs, and the model is copied to them at every step",
                "start one process per GPU (torchrun, accelerate launch) with DistributedDataParallel",
            )


@rule(
    "script-eval-with-grad",
    "warning",
    "script",
    bad=GOOD.replace("    with torch.no_grad():\n", "    if True:\n"),
    good=GOOD,
)
def eval_with_grad(document: Document, context: Context) -> Iterator[Problem]:
    """model.eval() does not stop autograd: without no_grad a validation loop builds every graph, and takes the memory
    of training."""
    script = script_of(document)
    if script is None:
        return
    for call in script.calls("eval"):
        name, function = dotted(receiver(call)), script.function_of(call)
        if not name or (function is not None and not _always_with_grad(script, function)):
            continue
        for loop in script.inside(function.body if function is not None else script.tree.body):
            if not isinstance(loop, ast.For) or line_of(loop) < line_of(call) or _without_grad(script, loop):
                continue
            nodes = list(script.inside(loop.body))
            runs = [each for each in nodes if isinstance(each, ast.Call) and dotted(each.func) == name]
            if runs and not any(is_backward(each) for each in nodes) and not _without_grad(script, runs[0]):
                again = [each for each in script.calls("train") if dotted(receiver(each)) == name]
                if any(line_of(call) < line_of(each) < line_of(runs[0]) for each in again):
                    continue
                yield Problem(
                    line_of(runs[0]),
                    f"{shown(runs[0])} in a validation loop with autograd on: every batch builds its graph",
                    "put the loop into `with torch.no_grad():`",
                )
                break


def _always_with_grad(script: Script, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether no decorator and no caller in the script turns autograd off."""
    calls = script.calls_of(function)
    decorated = any("grad" in shown(each) or "inference" in shown(each) for each in function.decorator_list)
    return bool(calls) and not decorated and not any(_without_grad(script, call) for call in calls)


def _without_grad(script: Script, node: ast.AST) -> bool:
    if "set_grad_enabled" in script.text or "inference_mode(True)" in script.text:
        return True
    for parent in script.ancestors(node):
        if isinstance(parent, ast.With | ast.AsyncWith):
            if any(word in shown(item.context_expr) for item in parent.items for word in ("no_grad", "inference")):
                return True
        if isinstance(parent, ast.FunctionDef):
            if any("grad" in shown(each) or "inference" in shown(each) for each in parent.decorator_list):
                return True
    return False
