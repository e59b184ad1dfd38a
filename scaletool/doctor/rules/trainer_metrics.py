"""Rules over metric functions of the Trainer, read as syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule
from scaletool.doctor.rules.names import Function, argument, dotted, line_of, method, names_in, receiver, shown
from scaletool.doctor.rules.syntax import Script, script_of
from scaletool.doctor.rules.trainer_script import GOOD, Training, is_seq2seq, trainings

LOGITS = "T5's logits are 65.8 MB per sample in float32 (512 x 32,128), kept for the whole evaluation on every rank"


class Metrics(NamedTuple):
    """How a metric function uses the predictions. argmax, decoded: where it does. picks: it takes the logits out of a
    tuple itself."""

    function: Function
    argmax: ast.Call | None
    decoded: ast.Call | None
    picks: bool


def _function_of(script: Script, value: ast.expr | None, depth: int = 0) -> Function | None:
    """The function of the script that is passed: by name, as the result of a maker, or bound to arguments."""
    for origin in script.origins(value):
        node = origin.node
        if isinstance(node, ast.Call) and script.called(node) == "partial" and node.args and depth < 3:
            return _function_of(script, node.args[0], depth + 1)
        name = dotted(node).removeprefix("self.")
        if len(script.functions.get(name, ())) == 1:
            return script.functions[name][0]
    return None


def _metrics(script: Script, function: Function) -> Metrics | None:
    own = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
    if not own:
        return None
    predictions = _predictions(function, own)
    nodes = list(script.inside(function.body))
    argmax = next((node for node in nodes if method(node) == "argmax" and _over(script, node) & predictions), None)
    decoders = ("batch_decode", "decode")
    decoded = next(
        (node for node in nodes if method(node) in decoders and isinstance(node, ast.Call) and node.args
         and names_in(node.args[0]) & predictions),
        None,
    )  # fmt: skip
    indexed = any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == 0
        and dotted(node.value).rpartition(".")[2] in predictions - set(own)
        for node in nodes
    )
    tested = any(isinstance(node, ast.Call) and dotted(node.func) == "isinstance" for node in nodes)
    return Metrics(
        function,
        argmax if isinstance(argmax, ast.Call) else None,
        decoded if isinstance(decoded, ast.Call) else None,
        indexed or tested,
    )


def _over(script: Script, node: ast.AST) -> set[str]:
    """Names in what an argmax goes over."""
    if not isinstance(node, ast.Call):
        return set()
    over = receiver(node)
    if over is None or script.full(over) in ("np", "numpy", "torch", "jnp"):
        over = argument(node, 0, "a", "input")
    return names_in(over) if over is not None else set()


def _predictions(function: Function, parameters: list[str]) -> set[str]:
    """Names in a metric function that stand for the predictions."""
    found = {"predictions"}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            from_parameter = bool(names_in(node.value) & set(parameters))
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            elif isinstance(target, ast.Tuple) and target.elts and from_parameter:
                found.add(dotted(target.elts[0]))
                continue
            else:
                pairs = [(target, node.value)]
            for each, value in pairs:
                first = (
                    isinstance(value, ast.Subscript)
                    and dotted(value.value) in parameters
                    and (isinstance(value.slice, ast.Constant) and value.slice.value == 0)
                )
                moved = not isinstance(value, ast.Call) or method(value) in ("array", "asarray", "from_numpy", "tensor")
                if first or (moved and names_in(value) & found and not isinstance(value, ast.Compare)):
                    found.add(dotted(each))
    return found - {""}


@rule(
    "script-metrics-on-logits",
    "error",
    "script",
    bad=GOOD.replace("        preprocess_logits_for_metrics=best_ids,\n", "").replace(
        "(result.predictions ==", "(result.predictions.argmax(-1) =="
    ),
    good=GOOD,
    link="huggingface/transformers#15466",
)
def metrics_on_logits(document: Document, context: Context) -> Iterator[Problem]:
    """T5's predictions are a tuple of logits and encoder states: argmax over it ends with "inhomogeneous shape" at the
    first evaluation, before the first save. And without preprocess_logits_for_metrics all logits of the evaluation set
    are gathered and kept in float32 on every rank: 65.8 MB per sample."""
    script = script_of(document)
    if script is None or not is_seq2seq(script):
        return
    for training in trainings(script):
        function = _function_of(script, training.get("compute_metrics"))
        metrics = _metrics(script, function) if function is not None else None
        if metrics is None or training.get("preprocess_logits_for_metrics") is not None:
            continue
        if {"prediction_step", "evaluation_loop", "evaluate"} & training.own or not training.given.complete:
            continue
        if training.arguments is None and training.name != "Trainer" and metrics.argmax is None:
            continue
        yield from _metric_problems(script, training, metrics)


def _metric_problems(script: Script, training: Training, metrics: Metrics) -> Iterator[Problem]:
    fix = (
        "give Trainer preprocess_logits_for_metrics: a function (logits, labels) that returns "
        "(logits[0] if isinstance(logits, tuple) else logits).argmax(-1), and use the ids in compute_metrics"
    )
    entry = training.arguments.get("predict_with_generate") if training.arguments else None
    generated = training.name == "Seq2SeqTrainer" and entry is not None
    if metrics.argmax is not None and generated and entry is not None and script.constant(entry.value) is True:
        what = "argmax over what predict_with_generate returns: these are token ids already"
        yield Problem(line_of(metrics.argmax), what, "drop the argmax")
    elif metrics.argmax is not None and not metrics.picks:
        yield Problem(
            line_of(metrics.argmax),
            f"{metrics.function.name} takes {shown(metrics.argmax)}, but T5's predictions are a tuple (logits, encoder "
            f"states): it fails at the first evaluation; and without preprocess_logits_for_metrics {LOGITS}",
            fix,
        )
    elif metrics.argmax is not None:
        yield Problem(
            line_of(metrics.argmax),
            f"{metrics.function.name} takes the argmax after everything was gathered: {LOGITS}",
            fix,
            severity="warning",
        )
    elif metrics.decoded is not None and not generated and (training.arguments or training.name == "Trainer"):
        yield Problem(
            line_of(metrics.decoded),
            f"{metrics.function.name} decodes the predictions, but without predict_with_generate they are logits: it "
            f"fails at the first evaluation; {LOGITS}",
            "use Seq2SeqTrainer with predict_with_generate=True, or " + fix.removeprefix("give "),
        )


@rule(
    "script-preprocess-on-tuple",
    "error",
    "script",
    bad=GOOD.replace("(logits[0] if isinstance(logits, tuple) else logits).argmax", "logits.argmax"),
    good=GOOD,
    link="huggingface/transformers#15466",
)
def preprocess_on_tuple(document: Document, context: Context) -> Iterator[Problem]:
    """preprocess_logits_for_metrics gets T5's tuple of logits and encoder states: a tuple has no argmax."""
    script = script_of(document)
    if script is None or not is_seq2seq(script):
        return
    for training in trainings(script):
        function = _function_of(script, training.get("preprocess_logits_for_metrics"))
        if function is None or not function.args.args:
            continue
        name = function.args.args[0].arg
        nodes = list(script.inside(function.body))
        if any(isinstance(node, ast.Subscript) and dotted(node.value) == name for node in nodes):
            continue
        if any(isinstance(node, ast.Call) and dotted(node.func) == "isinstance" for node in nodes):
            continue
        for node in nodes:
            if method(node) != "argmax" or not isinstance(node, ast.Call):
                continue
            over = argument(node, 0, "input") if dotted(receiver(node)) == "torch" else receiver(node)
            if dotted(over) == name and not any(_rebinds(each, name) for each in nodes):
                yield Problem(
                    line_of(node),
                    f"{shown(node)} in {function.name}: for T5 {name} is a tuple (logits, encoder states)",
                    f"take {name}[0] where isinstance({name}, tuple)",
                )


def _rebinds(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
