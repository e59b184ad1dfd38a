"""Rules over how training scripts read, share out and pad their data, read as syntax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule
from scaletool.doctor.rules.names import argument, dotted, keyword, line_of, names_in, receiver, shown
from scaletool.doctor.rules.script import GOOD as GOOD_LOOP
from scaletool.doctor.rules.script import GOOD_TORCH
from scaletool.doctor.rules.syntax import Script, script_of
from scaletool.doctor.rules.trainer_script import GOOD as GOOD_TRAINER
from scaletool.doctor.rules.trainer_script import Training, is_set_elsewhere, trainings

GOOD_STREAM = """\
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5ForConditionalGeneration

tokenizer = AutoTokenizer.from_pretrained("t5-small")


def rows(files):
    for file in files:
        with open(file) as lines:
            for line in lines:
                yield tokenizer(line, truncation=True, max_length=512)


def main(files):
    config = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = Accelerator(mixed_precision="fp16", dataloader_config=config)
    model = T5ForConditionalGeneration.from_pretrained("t5-small", dtype=torch.float32)
    stream = IterableDataset.from_generator(rows, gen_kwargs={"files": files}).shuffle(seed=1, buffer_size=10_000)
    collate = DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8)
    loader = DataLoader(stream, batch_size=8, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
"""
CONFIGURATION = "    config = DataLoaderConfiguration(dispatch_batches=False)\n"

MAP_STYLE = {"load_from_disk", "TensorDataset", "from_list", "from_dict", "from_pandas", "from_json", "from_csv"}
COLLATORS = {"DataCollatorForSeq2Seq", "DataCollatorWithPadding", "DataCollatorForTokenClassification"}


# --- what a dataset is


def is_stream(script: Script, value: ast.expr | None) -> bool:
    """Whether a dataset is surely an iterable one, without a length."""
    return any(_makes_stream(script, node) for node in script.sources(value))


def _makes_stream(script: Script, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = script.called(node)
    if name == "from_generator":
        return dotted(receiver(node)).rpartition(".")[2] == "IterableDataset"
    if name == "load_dataset":
        return script.constant(keyword(node, "streaming")) is True
    if name in script.classes:
        return script.based_on(name, "IterableDataset") and "__len__" not in script.own_methods(name)
    return name == "to_iterable_dataset"


def is_map_style(script: Script, value: ast.expr | None) -> bool:
    """Whether a dataset surely has a length and is read by index."""
    sources = script.sources(value)
    if not sources or is_stream(script, value):
        return False
    for node in sources:
        name = script.called(node)
        if name == "load_dataset" and isinstance(node, ast.Call):
            if keyword(node, "streaming") is None and not any(each.arg is None for each in node.keywords):
                return True
        elif name in MAP_STYLE or (name in script.classes and "__getitem__" in script.own_methods(name)):
            return True
    return False


def is_sharded_generator(script: Script, node: ast.Call) -> bool:
    """Whether gen_kwargs may hold a list, which makes the shards."""
    kwargs = keyword(node, "gen_kwargs")
    if kwargs is None:
        return False
    for origin in script.origins(kwargs):
        if not isinstance(origin.node, ast.Dict):
            return True
        for value in origin.node.values:
            for inner in script.origins(value):
                made = inner.node
                if isinstance(made, ast.List | ast.ListComp) or script.called(made) in (
                    "glob", "sorted", "list", "listdir", "split",
                ):  # fmt: skip
                    return True
                if re.search(r"(files|paths|shards|parts|urls|names)$", shown(made).strip("'\"])")):
                    return True
    return False


def loaders(script: Script) -> list[ast.Call]:
    return script.calls("DataLoader", "StatefulDataLoader")


def dataset_of(loader: ast.Call) -> ast.expr | None:
    return argument(loader, 0, "dataset")


def prepared_loaders(script: Script) -> list[tuple[ast.Call, ast.expr]]:
    """Loaders that go through accelerator.prepare, with the argument by which they do."""
    found: list[tuple[ast.Call, ast.expr]] = []
    for call in script.accelerator_calls("prepare", "prepare_data_loader"):
        for value in call.args:
            for origin in script.origins(value):
                if isinstance(origin.node, ast.Call) and origin.node in loaders(script):
                    if all(origin.node is not loader for loader, _ in found):
                        found.append((origin.node, value))
    return found


def trained_loaders(script: Script) -> list[ast.Call]:
    """Loaders over which a training loop goes."""
    found: list[ast.Call] = []
    for loop in script.training_loops:
        over = loop.node.iter if isinstance(loop.node, ast.For | ast.AsyncFor) else None
        while (
            isinstance(over, ast.Call) and script.called(over) in ("enumerate", "tqdm", "trange", "zip") and over.args
        ):
            over = over.args[0]
        for origin in script.origins(over):
            if isinstance(origin.node, ast.Call) and origin.node in loaders(script) and origin.node not in found:
                found.append(origin.node)
    return found


def dispatches(script: Script, training: Training | None = None) -> bool:
    """Whether accelerate's default stands: rank 0 reads a stream for all."""
    if re.search(r"dispatch_batches|put_on_device|accelerator_config", script.text):
        return False
    if training is None:
        return True
    own = {"get_train_dataloader", "create_accelerator_and_postprocess"} & training.own
    return training.arguments is not None and not own


# --- sharing out


SPLIT_TWICE = "so (processes - 1)/processes of the rows are never read (measured: 102 of 203 with 2 processes)"


@rule(
    "script-split-twice",
    "error",
    "script",
    bad=GOOD_LOOP.replace(
        'DataLoader(rows["train"],',
        "DataLoader(split_dataset_by_node(rows['train'], accelerator.process_index, accelerator.num_processes),",
    ),
    good=GOOD_LOOP,
    link="measured: 102 of 203 rows with 2 processes",
)
def split_twice(document: Document, context: Context) -> Iterator[Problem]:
    """accelerator.prepare and Trainer share the rows out among the processes. Data that is already split by rank loses
    the share of all other processes, silently."""
    script = script_of(document)
    if script is None:
        return
    for loader, value in prepared_loaders(script):
        split = _split(script, loader)
        if split is not None:
            yield Problem(
                line_of(split),
                f"{shown(split)} already splits the data by rank, and accelerator.prepare (line {line_of(value)}) "
                f"splits it once more, {SPLIT_TWICE}",
                "drop the split, or keep this loader out of prepare",
            )
    for training in trainings(script):
        if "get_train_dataloader" in training.own:
            continue
        for node in script.sources(training.get("train_dataset")):
            if _splits_by_rank(script, node):
                yield Problem(
                    line_of(node),
                    f"{shown(node)} already splits the data by rank, and {training.name} splits it once more, "
                    f"{SPLIT_TWICE}",
                    "drop the split, or override get_train_dataloader with a loader of your own",
                )
                break


def _split(script: Script, loader: ast.Call) -> ast.expr | None:
    sampler = keyword(loader, "sampler")
    for origin in script.origins(sampler):
        if script.called(origin.node) == "DistributedSampler":
            return origin.node
    return next((node for node in script.sources(dataset_of(loader)) if _splits_by_rank(script, node)), None)


def _splits_by_rank(script: Script, node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        return _is_rank_slice(script, node)
    if not isinstance(node, ast.Call):
        return False
    name = script.called(node)
    if name == "split_dataset_by_node":
        return True
    if name == "shard":
        return script.is_rank(argument(node, 1, "index"))
    if name == "islice" and len(node.args) == 4:
        return script.is_rank(node.args[1]) and script.is_world(node.args[3])
    if name in ("load_dataset", "from_generator"):
        values = [keyword(node, "data_files"), keyword(node, "gen_kwargs")]
        return any(_holds_rank_slice(script, value) for value in values if value is not None)
    if name in script.classes:
        return any(_takes_by_rank(script, each) for each in ast.walk(script.classes[name]))
    return False


def _holds_rank_slice(script: Script, value: ast.expr) -> bool:
    for origin in script.origins(value):
        inner = list(origin.node.values) if isinstance(origin.node, ast.Dict) else [origin.node]
        if any(_is_rank_slice(script, each.node) for part in inner for each in script.origins(part)):
            return True
    return False


def _is_rank_slice(script: Script, node: ast.AST) -> bool:
    """rows[rank::world]"""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice):
        return False
    lower, step = node.slice.lower, node.slice.step
    return lower is not None and step is not None and script.is_rank(lower) and script.is_world(step)


def _takes_by_rank(script: Script, node: ast.AST) -> bool:
    """index % world == rank"""
    if not isinstance(node, ast.Compare) or len(node.comparators) != 1:
        return _is_rank_slice(script, node)
    sides = (node.left, node.comparators[0])
    return any(
        isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) and script.is_world(each.right) for each in sides
    ) and any(script.is_rank(each) for each in sides)


@rule(
    "script-dispatcher",
    "warning",
    "script",
    bad=GOOD_STREAM.replace(CONFIGURATION, "").replace(", dataloader_config=config", ""),
    good=GOOD_STREAM,
    link="huggingface/transformers#24999",
)
def dispatcher(document: Document, context: Context) -> Iterator[Problem]:
    """By default rank 0 reads and tokenises a stream for all processes and sends them their rows: more GPUs do not read
    faster (measured on 2 processes: 195 ms per step dispatched, 66 ms with true shards and a worker). Batches of
    different widths cannot be dispatched at all."""
    script = script_of(document)
    if script is None:
        return
    seen: set[ast.expr] = set()
    for data, collate, line in _dispatched(script):
        node = next((each for each in script.sources(data) if _makes_stream(script, each)), None)
        if node is None or node in seen:
            continue
        seen.add(node)
        generator = script.called(node) == "from_generator" and isinstance(node, ast.Call)
        single = generator and isinstance(node, ast.Call) and not is_sharded_generator(script, node)
        shards = "; a generator without a list in gen_kwargs is one shard" if single else ""
        fix = "set dispatch_batches=False (DataLoaderConfiguration, or accelerator_config of TrainingArguments)"
        fix += ", and hand the files as a list in gen_kwargs, as many as a multiple of the processes" if single else ""
        if _is_ragged(script, collate):
            yield Problem(
                line,
                f"the stream of line {line_of(node)} is dispatched by rank 0, but its batches are padded to their own "
                'longest row: "can\'t use batches of different size with dispatch_batches=True" with 2 or more '
                "processes",
                fix,
                severity="error",
            )
        else:
            yield Problem(
                line_of(node),
                "stream under accelerate's default dispatcher (dispatch_batches): rank 0 reads and tokenises for all "
                f"processes, so more GPUs do not read faster{shards}",
                fix,
            )


def _dispatched(script: Script) -> Iterator[tuple[ast.expr | None, ast.expr | None, int]]:
    """Dataset, collator and line of what goes through the dispatcher, if it is a stream."""
    if dispatches(script):
        for loader, _ in prepared_loaders(script):
            yield dataset_of(loader), argument(loader, 6, "collate_fn"), line_of(loader)
    for training in trainings(script):
        if dispatches(script, training):
            yield training.get("train_dataset"), training.get("data_collator", 2), line_of(training.call)


def _is_ragged(script: Script, collate: ast.expr | None) -> bool:
    """Whether batches surely differ in width: padded to their longest, and nothing pads rows before."""
    if re.search(r"max_length[\"']|pad_to_max|enable_padding", script.text):
        return False
    for origin in script.origins(collate):
        if isinstance(origin.node, ast.Call) and script.called(origin.node) in COLLATORS:
            padding = argument(origin.node, 2 if script.called(origin.node).endswith("Seq2Seq") else 1, "padding")
            if padding is None or script.constant(padding) in (True, "longest"):
                return True
    return False


@rule(
    "script-stream-without-max-steps",
    "error",
    "script",
    bad=GOOD_TRAINER.replace('"valid": "valid.jsonl"}', '"valid": "valid.jsonl"}, streaming=True'),
    good=GOOD_TRAINER,
    link="ValueError in transformers 5",
)
def stream_without_max_steps(document: Document, context: Context) -> Iterator[Problem]:
    """A stream has no length: without max_steps the Trainer ends with a ValueError when it is made."""
    script = script_of(document)
    if script is None or is_set_elsewhere(script, "max_steps"):
        return
    for training in trainings(script):
        if training.arguments is None or not is_stream(script, training.get("train_dataset")):
            continue
        entry = training.arguments.get("max_steps")
        limit = script.constant(entry.value) if entry is not None else -1
        if isinstance(limit, int) and limit <= 0:
            yield Problem(
                entry.line if entry is not None else line_of(training.arguments.call),
                f"max_steps is not set, but train_dataset (line {line_of(training.call)}) is a stream without a "
                "length: ValueError, and num_train_epochs has no effect",
                "give max_steps = epochs * ceil(rows / (batch * accumulation * processes))",
            )


@rule(
    "script-unshuffled",
    "warning",
    "script",
    bad=GOOD_LOOP.replace("batch_size=8, shuffle=True", "batch_size=8, shuffle=False"),
    good=GOOD_LOOP,
)
def unshuffled(document: Document, context: Context) -> Iterator[Problem]:
    """A training loader does not shuffle unless told to: every epoch goes through the rows in the order of the file."""
    script = script_of(document)
    if script is None:
        return
    for loader in trained_loaders(script):
        shuffle, data = argument(loader, 2, "shuffle"), dataset_of(loader)
        own_order = any(keyword(loader, name) is not None for name in ("sampler", "batch_sampler"))
        if own_order or any(each.arg is None for each in loader.keywords):
            continue
        if shuffle is not None and script.constant(shuffle) is not False:
            continue
        if (
            any(script.called(node) in ("shuffle", "sort") for node in script.sources(data))
            or "shuffle(" in script.text
        ):
            continue
        if is_map_style(script, data):
            yield Problem(
                line_of(loader),
                "the training loader does not shuffle (shuffle=False): every epoch has the order of the file",
                "write shuffle=True",
            )
        elif shuffle is not None and is_stream(script, data):
            yield Problem(
                line_of(loader),
                "the training stream is never shuffled: every epoch has the order of the file",
                "call .shuffle(seed=..., buffer_size=10_000) on the dataset, and set_epoch(epoch) at each epoch",
                severity="info",
            )


@rule(
    "script-set-epoch",
    "warning",
    "script",
    bad=GOOD_TORCH.replace("        sampler.set_epoch(epoch)\n", ""),
    good=GOOD_TORCH,
    link="torch's documentation of DistributedSampler",
)
def set_epoch(document: Document, context: Context) -> Iterator[Problem]:
    """DistributedSampler and shuffled streams take their order from set_epoch: without it every epoch has the same."""
    script = script_of(document)
    if script is None or "set_epoch" in script.text or not script.training_loops:
        return
    if not any(_has_epochs(script, loop.node) for loop in script.training_loops):
        return
    prepared = [loader for loader, _ in prepared_loaders(script)]
    for loader in trained_loaders(script):
        if loader in prepared:
            continue
        for origin in script.origins(keyword(loader, "sampler")):
            made = origin.node
            if isinstance(made, ast.Call) and script.called(made) == "DistributedSampler":
                if script.constant(keyword(made, "shuffle")) is not False:
                    yield Problem(
                        line_of(made),
                        "DistributedSampler without set_epoch: every epoch has the same order",
                        "call sampler.set_epoch(epoch) at the start of each epoch",
                    )
        data = dataset_of(loader)
        if is_stream(script, data) and any(script.called(node) == "shuffle" for node in script.sources(data)):
            yield Problem(
                line_of(loader),
                "a shuffled stream without set_epoch: every epoch has the same order",
                "call dataset.set_epoch(epoch) at the start of each epoch",
            )


def _has_epochs(script: Script, loop: ast.AST) -> bool:
    """Whether a training loop runs in a loop over epochs, here or where its function is called."""
    if any(isinstance(parent, ast.For | ast.While) for parent in script.ancestors(loop)):
        return True
    function = script.function_of(loop)
    calls = script.calls_of(function) if function is not None else []
    return any(isinstance(parent, ast.For | ast.While) for call in calls for parent in script.ancestors(call))


@rule(
    "script-loader-not-shared",
    "error",
    "script",
    bad=GOOD_LOOP.replace(
        "optimizer, loader, valid = accelerator.prepare(model, optimizer, loader, valid)",
        "optimizer, valid = accelerator.prepare(model, optimizer, valid)",
    ),
    good=GOOD_LOOP,
    link="huggingface/datasets#5360",
)
def loader_not_shared(document: Document, context: Context) -> Iterator[Problem]:
    """A loader that neither prepare nor a DistributedSampler nor a split by rank shares out gives every process the
    same rows: with n processes an epoch takes as long as with one."""
    script = script_of(document)
    if script is None:
        return
    wrapped = script.accelerator_calls("prepare", "prepare_model") or script.calls("DDP", "DistributedDataParallel")
    if not wrapped or any(isinstance(arg, ast.Starred) for call in script.calls("prepare") for arg in call.args):
        return
    prepared = [loader for loader, _ in prepared_loaders(script)]
    handed_on = {dotted(arg) for call in script.calls("prepare", "prepare_data_loader") for arg in call.args}
    for loader in trained_loaders(script):
        data = dataset_of(loader)
        own = any(keyword(loader, name) is not None for name in ("sampler", "batch_sampler"))
        if loader in prepared or own or len(loader.args) > 3 or any(each.arg is None for each in loader.keywords):
            continue
        if _targets(script, loader) & handed_on or _knows_rank(script, data):
            continue
        if is_map_style(script, data) or is_stream(script, data):
            yield Problem(
                line_of(loader),
                "this training loader is not shared out: it is not prepared, and has neither a DistributedSampler nor "
                "data split by rank, so every process trains on the same rows",
                "give it to accelerator.prepare, or use DistributedSampler or split_dataset_by_node",
            )


def _targets(script: Script, loader: ast.Call) -> set[str]:
    """Names that the loader is assigned to."""
    statement = script.parents.get(loader)
    return {dotted(each) for each in statement.targets} if isinstance(statement, ast.Assign) else set()


def _knows_rank(script: Script, data: ast.expr | None) -> bool:
    """Whether anything on the way of a dataset may ask for the rank."""
    for node in script.sources(data):
        whole: ast.AST = node
        if isinstance(node, ast.Call) and script.called(node) in script.classes:
            whole = script.classes[script.called(node)]
        inner = {script.called(each) for each in ast.walk(whole) if isinstance(each, ast.Call)}
        functions = [each for name in inner | names_in(whole) for each in script.functions.get(name, ())]
        for part in (whole, *functions):
            if any(
                isinstance(each, ast.expr) and (script.is_rank(each) or script.is_world(each))
                for each in ast.walk(part)
            ):
                return True
        if _splits_by_rank(script, node):
            return True
    return False


@rule(
    "script-resumed-stream",
    "warning",
    "script",
    bad=GOOD_TRAINER.replace('"valid": "valid.jsonl"}', '"valid": "valid.jsonl"}, streaming=True')
    .replace("num_train_epochs=3", 'max_steps=9000, accelerator_config={"dispatch_batches": False}')
    .replace("trainer.train()", "trainer.train(resume_from_checkpoint=True)"),
    good=GOOD_TRAINER,
    link="huggingface/transformers#26413",
)
def resumed_stream(document: Document, context: Context) -> Iterator[Problem]:
    """A Trainer that resumes on a stream starts at its first row again (measured with transformers 5.24: 15 batches
    done, then sample 0)."""
    script = script_of(document)
    if script is None or "ignore_data_skip" in script.text or "load_state_dict" in script.text:
        return
    for training in trainings(script):
        if training.arguments is None or not is_stream(script, training.get("train_dataset")):
            continue
        for call in script.calls("train"):
            value = argument(call, 0, "resume_from_checkpoint")
            if value is not None and (script.constant(value) is True or isinstance(script.constant(value), str)):
                yield Problem(
                    line_of(call),
                    "resume_from_checkpoint on a stream: the Trainer starts at the stream's first row again",
                    "keep the position yourself (the dataset's state_dict), and set ignore_data_skip=True",
                )
