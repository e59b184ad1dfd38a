"""Rules over padding and labels in training scripts, read as syntax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule
from scaletool.doctor.rules.names import argument, dotted, keyword, line_of, method, names_in, receiver, shown
from scaletool.doctor.rules.script import GOOD as GOOD_LOOP
from scaletool.doctor.rules.script import uses_accelerate
from scaletool.doctor.rules.script_data import COLLATORS
from scaletool.doctor.rules.syntax import Script, script_of
from scaletool.doctor.rules.trainer_script import GOOD as GOOD_TRAINER
from scaletool.doctor.rules.trainer_script import trainings

PADDING_COST = "measured: 512 ragged pairs took 164 s padded to 512 and 128, 73 s padded to the longest of each batch"


@rule(
    "script-padding-to-maximum",
    "warning",
    "script",
    bad=GOOD_LOOP.replace("pad_to_multiple_of=8", 'padding="max_length", max_length=512'),
    good=GOOD_LOOP,
    link="measured: 164 s against 73 s for the same rows",
)
def padding_to_maximum(document: Document, context: Context) -> Iterator[Problem]:
    """Padding every row to the maximum computes on padding: 512 ragged pairs took 164 s padded to 512 and 128, 73 s
    padded to the longest of each batch, 28 s sorted by length."""
    script = script_of(document)
    if script is None or not (script.training_loops or trainings(script) or uses_accelerate(script)):
        return
    for node in script.nodes:
        if not isinstance(node, ast.Call):
            continue
        padding, old = keyword(node, "padding"), keyword(node, "pad_to_max_length")
        to_max = padding is not None and script.constant(padding) == "max_length"
        if not to_max and not (old is not None and script.constant(old) is True):
            continue
        if _only_generates(script, node) or _under_condition(script, node):
            continue
        place = padding if padding is not None else old
        collator = script.called(node) in COLLATORS
        where = "every batch" if collator else "every row"
        fix = (
            "pad to the longest of each batch: leave padding out and give pad_to_multiple_of=8"
            if collator
            else "leave padding out here, and pad in DataCollatorForSeq2Seq(tokenizer, model=model, "
            "pad_to_multiple_of=8)"
        )
        yield Problem(
            line_of(place) if place is not None else line_of(node),
            f"{script.called(node)} pads {where} to the maximum (padding max_length{_to(script, node)})"
            f"{_share(script, node, context)}: {PADDING_COST}",
            fix,
        )


def _to(script: Script, node: ast.Call) -> str:
    value = keyword(node, "max_length")
    known = script.constant(value) if value is not None else None
    return f", {known if known is not None else shown(value)}" if value is not None else ""


def _share(script: Script, node: ast.Call, context: Context) -> str:
    tokens, most = context.facts.get("source_tokens"), script.constant(keyword(node, "max_length"))
    if isinstance(tokens, int) and isinstance(most, int) and 0 < tokens < most:
        return f", {most / tokens:.1f} times the {tokens} tokens of a typical source"
    return ""


def _under_condition(script: Script, node: ast.AST) -> bool:
    """Whether it is padded in some cases only, as for TPUs."""
    return any(
        isinstance(parent, ast.If | ast.IfExp)
        and not script.is_rank_test(parent.test)
        and "__name__" not in shown(parent.test)
        for parent in script.ancestors(node)
    )


def _only_generates(script: Script, node: ast.Call) -> bool:
    """Whether what is padded goes to generate, not to training."""
    function = script.function_of(node)
    body = function.body if function is not None else []
    return any(method(each) == "generate" for each in script.inside(body))


@rule(
    "script-position-limit",
    "warning",
    "script",
    bad=GOOD_LOOP.replace("pad_to_multiple_of=8)", "pad_to_multiple_of=8, max_length=model.config.n_positions)"),
    good=GOOD_LOOP,
    link="transformers 5: T5Config has no n_positions (source)",
)
def position_limit(document: Document, context: Context) -> Iterator[Problem]:
    """T5 has relative positions, so no longest input: n_positions is a left-over of old checkpoints, which T5Config in
    transformers 5 no longer has."""
    script = script_of(document)
    if script is None or not re.search("t5", script.text, re.IGNORECASE):
        return
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "n_positions" and "config" in dotted(node.value):
            yield Problem(
                line_of(node),
                f"{shown(node)} as a length: T5 has relative positions and no such limit, and a T5Config made by "
                "transformers 5 has no n_positions (AttributeError)",
                "choose the length from the data, for example the 99th percentile of the token counts",
            )


@rule(
    "script-labels-padded",
    "error",
    "script",
    bad=GOOD_TRAINER.replace("truncation=True, max_length=128)", "truncation=True, max_length=128, padding=True)"),
    good=GOOD_TRAINER,
    link="T5 masks only -100 (source)",
)
def labels_padded(document: Document, context: Context) -> Iterator[Problem]:
    """T5's loss leaves out labels of -100 only. Labels padded with the pad id train the model to write padding, and the
    loss looks better than it is."""
    script = script_of(document)
    if script is None or _masks(script):
        return
    for value, line in _labels(script):
        padded = _padded_by(script, value)
        if padded is not None:
            yield Problem(
                line,
                f"labels come padded with the pad id ({shown(padded)}), but only -100 is left out of the loss",
                "leave padding out and let DataCollatorForSeq2Seq pad labels with -100, or set labels[labels == "
                "tokenizer.pad_token_id] = -100",
            )
    for call in script.calls("DataCollatorForSeq2Seq"):
        pad = keyword(call, "label_pad_token_id")
        known = script.constant(pad) if pad is not None else None
        is_id = isinstance(pad, ast.Attribute) and pad.attr == "pad_token_id"
        if pad is not None and (is_id or (type(known) is int and known != -100)):
            yield Problem(
                line_of(pad),
                f"label_pad_token_id={shown(pad)}: only -100 is left out of the loss",
                "leave it out: -100",
            )
    for call in script.calls("__call__", *_tokenizers(script)):
        if keyword(call, "text_target") is not None and call.args and _pads(script, call):
            yield Problem(
                line_of(call),
                f"labels (text_target) are padded with the pad id by padding={shown(keyword(call, 'padding'))}, but "
                "only -100 is left out of the loss",
                "leave padding out and let DataCollatorForSeq2Seq pad labels with -100",
            )


def _masks(script: Script) -> bool:
    """Whether -100 is put somewhere, or the loss has an index of its own to ignore."""
    if "ignore_index" in script.text:
        return True
    for node in script.nodes:
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant) and node.operand.value == 100:
            if not isinstance(script.parents.get(node), ast.Compare):
                return True
    return False


def _tokenizers(script: Script) -> list[str]:
    """Names under which tokenizers are called."""
    return [name for name in script.calls_by_name if name.lower() in ("tokenizer", "tok", "tokeniser", "tk")]


def _labels(script: Script) -> Iterator[tuple[ast.expr, int]]:
    """What becomes labels: x["labels"] = ..., {"labels": ...}, labels = pad_sequence(...)."""
    for node in script.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                    if target.slice.value == "labels":
                        yield node.value, line_of(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=False):
                if isinstance(key, ast.Constant) and key.value == "labels":
                    yield value, line_of(value)
        elif isinstance(node, ast.Call) and dotted(node.func) == "dict":
            labels = keyword(node, "labels")
            if labels is not None:
                yield labels, line_of(labels)


def _padded_by(script: Script, value: ast.expr) -> ast.Call | None:
    """The call that pads what becomes labels."""
    for origin in script.origins(value):
        node: ast.expr = origin.node
        while isinstance(node, ast.Subscript | ast.Attribute) or method(node) == "clone":
            node = (
                node.func.value
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                else (node.value if isinstance(node, ast.Subscript | ast.Attribute) else node)
            )
        for inner in script.origins(node):
            made = inner.node
            if not isinstance(made, ast.Call):
                continue
            name = script.called(made)
            if name == "pad_sequence":
                filler = argument(made, 2, "padding_value")
                if filler is None or "pad_token_id" in names_in(filler) or script.constant(filler) == 0:
                    return made
            elif name in _tokenizers(script) and _pads(script, made) and not _is_source(made):
                return made
            elif name == "pad" and dotted(receiver(made)).rpartition(".")[2] in ("tokenizer", "tok"):
                return made
    return None


def _is_source(call: ast.Call) -> bool:
    """Both sides in one call: found on its own."""
    return keyword(call, "text_target") is not None and bool(call.args)


def _pads(script: Script, call: ast.Call) -> bool:
    padding = keyword(call, "padding")
    return padding is not None and script.constant(padding) in (True, "longest", "max_length")
