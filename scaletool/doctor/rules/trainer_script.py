"""Rules over scripts that train with the Trainer, read as syntax."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule
from scaletool.doctor.rules.arguments import REMOVED
from scaletool.doctor.rules.names import Entry, Given, argument, dotted, keyword, line_of, receiver, shown
from scaletool.doctor.rules.syntax import Script, script_of
from scaletool.doctor.schemas import schemas

GOOD = """\
from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)


def best_ids(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def accuracy(result):
    kept = result.label_ids != -100
    return {"accuracy": float((result.predictions == result.label_ids)[kept].mean())}


def main():
    tokenizer = AutoTokenizer.from_pretrained("t5-small")
    model = T5ForConditionalGeneration.from_pretrained("t5-small")
    model.accepts_loss_kwargs = False
    rows = load_dataset("json", data_files={"train": "train.jsonl", "valid": "valid.jsonl"})

    def encode(batch):
        encoded = tokenizer(batch["source"], truncation=True, max_length=512)
        encoded["labels"] = tokenizer(text_target=batch["target"], truncation=True, max_length=128)["input_ids"]
        return encoded

    rows = rows.map(encode, batched=True, remove_columns=["source", "target"])
    args = TrainingArguments(
        output_dir="runs/a",
        per_device_train_batch_size=8,
        num_train_epochs=3,
        learning_rate=1e-4,
        eval_strategy="steps",
        eval_steps=1000,
        save_steps=1000,
        fp16=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["valid"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best_ids,
    )
    trainer.train()
    trainer.save_model()


main()
"""
TRAINERS = ("Trainer", "Seq2SeqTrainer")
ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
FEW_STEPS = 20


class Training(NamedTuple):
    """A Trainer that a script makes. name: of its class; own: methods that a subclass in the script has itself.

    arguments: what it is trained with, where all of that can be seen.
    """

    call: ast.Call
    name: str
    own: set[str]
    given: Given
    arguments: Given | None

    def get(self, name: str, position: int | None = None) -> ast.expr | None:
        entry = self.given.get(name)
        return entry.value if entry else argument(self.call, position) if position is not None else None


def arguments_calls(script: Script) -> list[Given]:
    """Every TrainingArguments(...), with what is splatted into it."""
    return [
        script.given(call) for call in script.calls(*ARGUMENTS) if script.is_from(call.func, "transformers", *ARGUMENTS)
    ]


def trainings(script: Script) -> list[Training]:
    """Every Trainer(...) of transformers, or of a subclass in the script."""
    known = {given.call: given for given in arguments_calls(script)}
    found = []
    subclasses = [name for name in script.classes if script.based_on(name, *TRAINERS)]
    for call in script.calls(*TRAINERS, *subclasses):
        name = script.called(call)
        if name not in subclasses and not script.is_from(call.func, "transformers", *TRAINERS):
            continue
        given = script.given(call)
        entry = given.get("args")
        value = entry.value if entry else argument(call, 1)
        origins = [origin.node for origin in script.origins(value)]
        seen = [known[node] for node in origins if isinstance(node, ast.Call) and node in known]
        arguments = seen[0] if len(seen) == len(origins) == 1 and seen[0].complete else None
        base = "Seq2SeqTrainer" if script.based_on(name, "Seq2SeqTrainer") else name
        found.append(Training(call, base, script.own_methods(name), given, arguments))
    return found


def is_seq2seq(script: Script) -> bool:
    """Whether the model is plainly an encoder with a decoder and a word at each place as output."""
    if any(f"For{task}" in script.text for task in ("SequenceClassification", "TokenClassification", "CausalLM")):
        return False
    return bool(re.search(r"t5|Seq2Seq|ConditionalGeneration", script.text, re.IGNORECASE))


def is_t5(script: Script) -> bool:
    """Whether a model of the T5 family is loaded, by class or by checkpoint."""
    for call in script.calls("from_pretrained", "from_config", "T5ForConditionalGeneration"):
        owner = dotted(receiver(call)) or dotted(call.func)
        checkpoint = script.constant(argument(call, 0))
        if re.search(r"T5(ForConditional|Model|$)", owner) and "Encoder" not in owner:
            return True
        if "Seq2SeqLM" in owner and isinstance(checkpoint, str) and "t5" in checkpoint.lower():
            return True
    return False


def is_set_elsewhere(script: Script, name: str) -> bool:
    """Whether an attribute of that name is assigned somewhere: args.max_steps = ..."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
        for node in script.nodes
    )


# --- steps


@rule(
    "script-max-steps-times-world",
    "error",
    "script",
    bad=GOOD.replace(
        "num_train_epochs=3", "max_steps=3 * math.ceil(len(rows['train']) / (8 * world_size)) * world_size"
    ),
    good=GOOD,
    link="measured with 4 processes: 60 steps instead of 15",
)
def max_steps_times_world(document: Document, context: Context) -> Iterator[Problem]:
    """max_steps counts optimizer steps of all processes together, each of which takes a batch on every process. Batches
    summed over all ranks make the run as many times too long as there are processes."""
    script = script_of(document)
    if script is None:
        return
    for entry in _max_steps(script):
        growth = script.growth(entry.value)
        if growth.low >= 1 or (growth.remultiplied and growth.low >= 0):
            yield Problem(
                entry.line,
                f"max_steps ({script.written(entry.value)}) is multiplied by the number of processes (world size): it "
                f"counts steps of the whole world, so on {max(context.counts)} GPUs the run is {max(context.counts)} "
                "times too long",
                "drop the factor: max_steps = epochs * ceil(rows / (batch * accumulation * processes))",
            )


def _max_steps(script: Script) -> Iterator[Entry]:
    for given in arguments_calls(script):
        entry = given.get("max_steps")
        if entry is not None:
            yield entry
    for node in script.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "max_steps" and "args" in dotted(target):
                    yield Entry("max_steps", node.value, line_of(node))


@rule(
    "script-max-steps-without-world",
    "warning",
    "script",
    bad=GOOD.replace("num_train_epochs=3", "max_steps=3 * len(rows['train']) // 8"),
    good=GOOD,
    link="measured with 4 processes: 60 steps instead of 15",
)
def max_steps_without_world(document: Document, context: Context) -> Iterator[Problem]:
    """Rows over the batch of one process are the batches of all processes together; max_steps counts steps that take
    one on each. A count that a config brings may be either: it has to be that of one process."""
    script = script_of(document)
    if script is None:
        return
    for given in arguments_calls(script):
        entry = given.get("max_steps")
        batch = given.get("per_device_train_batch_size")
        if entry is None:
            continue
        growth = script.growth(entry.value)
        size = script.constant(batch.value) if batch is not None else None
        divisors = set(re.findall(r"\b\d+\b", shown(entry.value))) | growth.divisors
        per_device = batch is not None and (shown(batch.value) in divisors or str(size) in divisors)
        rows = any(re.match(r"len\(.*(data|rows|train|set)", base) for base in growth.bases)
        loaders = any("loader" in base for base in growth.bases)
        if (growth.low, growth.high) == (0, 0) and rows and per_device and not loaders and not growth.remultiplied:
            yield Problem(
                entry.line,
                f"max_steps ({script.written(entry.value)}) is not divided by the number of processes: on "
                f"{max(context.counts)} GPUs the run is {max(context.counts)} times too long",
                "divide by WORLD_SIZE too, or give num_train_epochs",
            )
        elif (growth.low, growth.high) == (0, 0):
            counted = [base for base in growth.bases if re.search(r"batches_per_epoch|steps_in_epoch_total", base)]
            if counted:
                yield Problem(
                    entry.line,
                    f"max_steps ({shown(entry.value)}) needs {shown_name(counted[0])} counted per process: with the "
                    "batches of all processes the run is as many times too long as there are processes",
                    "count them as ceil(rows / (batch * processes)); check with --set facts.batches_per_process=N",
                    severity="info",
                )


def shown_name(text: str) -> str:
    """The last name or key of an expression's text."""
    names = re.findall(r"[A-Za-z_]\w*", text)
    return names[-1] if names else text


# --- names of arguments


@rule(
    "script-arguments-removed",
    "error",
    "script",
    bad=GOOD.replace("eval_strategy", "evaluation_strategy"),
    good=GOOD,
    link="TypeError in transformers 5",
)
def arguments_removed(document: Document, context: Context) -> Iterator[Problem]:
    """Arguments that TrainingArguments no longer has, or never had, end the run with a TypeError, often after the model
    was loaded and the data prepared."""
    script = script_of(document)
    if script is None:
        return
    known = schemas().training_arguments
    release = schemas().versions["transformers"]
    for given in arguments_calls(script):
        for entry in given.entries:
            if entry.name in known:
                continue
            what = f"{entry.name} is no argument of {script.called(given.call)} in transformers {release}"
            if entry.name in REMOVED:
                yield Problem(entry.line, what, _python_fix(REMOVED[entry.name][1]))
            else:
                near = difflib.get_close_matches(entry.name, known, 1, 0.75)
                yield Problem(entry.line, what, f"did you mean {near[0]}?" if near else "delete it")


def _python_fix(fix: str) -> str:
    """The fix of a JSON key in the words of a script."""
    return re.sub(r"write (\w+): (.*)$", r"write \1=\2", fix) if "below 1" not in fix else fix


@rule(
    "script-trainer-arguments",
    "error",
    "script",
    bad=GOOD.replace("processing_class=", "tokenizer="),
    good=GOOD,
    link="TypeError in transformers 5",
)
def trainer_arguments(document: Document, context: Context) -> Iterator[Problem]:
    """Trainer no longer takes tokenizer=, and takes no names that it does not know: a TypeError after the data was
    prepared."""
    script = script_of(document)
    if script is None:
        return
    known = [*schemas().trainer, *TRAINER_LATER]
    for training in trainings(script):
        if "__init__" in training.own:
            continue
        for entry in training.given.entries:
            if entry.name in known:
                continue
            what = f"{training.name} has no argument {entry.name} in transformers {schemas().versions['transformers']}"
            near = difflib.get_close_matches(entry.name, known, 1, 0.75)
            fix = f"did you mean {near[0]}?" if near else "delete it"
            yield Problem(entry.line, what, "write processing_class=" if entry.name == "tokenizer" else fix)


TRAINER_LATER = ("self",)


# --- what costs


@rule(
    "script-frequent-evaluation",
    "warning",
    "script",
    bad=GOOD.replace("eval_steps=1000", "eval_steps=10"),
    good=GOOD,
)
def frequent_evaluation(document: Document, context: Context) -> Iterator[Problem]:
    """An evaluation or a checkpoint every few steps takes longer than the steps between."""
    script = script_of(document)
    if script is None:
        return
    for given in arguments_calls(script):
        total = given.get("max_steps")
        limit = script.constant(total.value) if total is not None else None
        if isinstance(limit, int) and 0 < limit <= 1000:
            continue
        for name, strategy in (("eval_steps", "eval_strategy"), ("save_steps", "save_strategy")):
            entry, how = given.get(name), given.get(strategy)
            steps = script.constant(entry.value) if entry is not None else None
            by_steps = (how is None and name == "save_steps") or (
                how is not None and script.constant(how.value) == "steps"
            )
            if entry is not None and by_steps and type(steps) is int and 1 <= steps <= FEW_STEPS:
                yield Problem(
                    entry.line, f"{name}={steps}: every {steps} steps the training stops for it", "some hundreds"
                )


@rule(
    "script-find-unused-parameters",
    "warning",
    "script",
    bad=GOOD.replace("ddp_find_unused_parameters=False", "ddp_find_unused_parameters=True"),
    good=GOOD,
    link="huggingface/transformers#9802",
)
def find_unused(document: Document, context: Context) -> Iterator[Problem]:
    """T5 with labels uses all its parameters; looking for unused ones costs 11 to 15% of a step (measured on a small
    model). Trainer does so unless told not to."""
    script = script_of(document)
    if script is None or not is_t5(script) or re.search("peft|lora|requires_grad", script.text, re.IGNORECASE):
        return
    for given in arguments_calls(script):
        entry = given.get("ddp_find_unused_parameters")
        if entry is not None and script.constant(entry.value) is True:
            yield _unused(entry.line, "ddp_find_unused_parameters=True")
        elif entry is None and given.complete and given.get("gradient_checkpointing") is None:
            problem = _unused(line_of(given.call), "ddp_find_unused_parameters is not set, and Trainer looks for them")
            yield problem._replace(severity="info")
    for call in script.calls("DistributedDataParallelKwargs", "DistributedDataParallel", "DDP"):
        value = keyword(call, "find_unused_parameters")
        if value is not None and script.constant(value) is True:
            yield _unused(line_of(value), "find_unused_parameters=True")


def _unused(line: int, what: str) -> Problem:
    message = f"{what}: T5 has no unused parameters, and the search costs 11 to 15% of a step (measured)"
    return Problem(line, message, "set it to False")


@rule(
    "script-loss-times-world",
    "info",
    "script",
    bad=GOOD.replace("    model.accepts_loss_kwargs = False\n", ""),
    good=GOOD,
    link="measured: first loss 6.97, 13.94 and 26.2 on 1, 2 and 4 processes",
)
def loss_times_world(document: Document, context: Context) -> Iterator[Problem]:
    """transformers 5 multiplies the loss of a T5, and so its gradient, by processes x accumulation: T5 takes any
    keyword, and so looks like a model that divides by the batch's items itself. Logs, clipping and fp16 headroom change
    with the number of GPUs."""
    script = script_of(document)
    if script is None or "accepts_loss_kwargs" in script.text or not is_t5(script):
        return
    for training in trainings(script):
        if not {"compute_loss", "training_step"} & training.own and training.get("compute_loss_func") is None:
            yield Problem(
                line_of(training.call),
                f"{training.name} multiplies T5's loss and gradient by processes x accumulation: on "
                f"{max(context.counts)} GPUs the log shows {max(context.counts)} times the loss",
                "set model.accepts_loss_kwargs = False before the Trainer is made",
            )


@rule(
    "script-nan-filter",
    "info",
    "script",
    bad=GOOD.replace("fp16=True,", "fp16=True,\n        logging_nan_inf_filter=True,"),
    good=GOOD,
    link="transformers 5: trainer.py (source)",
)
def nan_filter(document: Document, context: Context) -> Iterator[Problem]:
    """logging_nan_inf_filter replaces a NaN loss by the running mean in the log: a broken fp16 run looks healthy."""
    script = script_of(document)
    for given in arguments_calls(script) if script else ():
        assert script is not None
        entry, fp16 = given.get("logging_nan_inf_filter"), given.get("fp16")
        if entry is not None and fp16 is not None and script.constant(entry.value) is True:
            if script.constant(fp16.value) is True:
                yield Problem(
                    entry.line, "logging_nan_inf_filter=True hides NaN losses of fp16 in the log", "set it to False"
                )
