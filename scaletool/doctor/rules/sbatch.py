"""Rules over job scripts: their #SBATCH lines, and the shell commands that launch something. Nothing is run.

What a script only says through variables is followed as far as they have one value; beyond that nothing is said.
"""

from __future__ import annotations

import ast
import bisect
import difflib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import PurePosixPath
from typing import NamedTuple

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule

GOOD = """\
#!/bin/bash
#SBATCH --job-name=t5-base
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
port=$((20000 + SLURM_JOB_ID % 12000))
srun accelerate launch --multi_gpu --mixed_precision fp16 --num_machines 1 --num_processes 4 \\
  --main_process_port "$port" train.py
"""
GOOD_TWO = """\
#!/bin/bash
#SBATCH --job-name=t5-base
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PORT=$((20000 + SLURM_JOB_ID % 12000))
srun --kill-on-bad-exit=1 bash -c '
  exec accelerate launch --multi_gpu --mixed_precision fp16 --num_machines 2 --num_processes 16 \\
    --machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD" --main_process_port "$PORT" train.py'
"""
GOOD_SIGNAL = """\
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --output=%x-%j.out
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
srun accelerate launch --num_processes 8 train.py &
step=$!
until wait "$step"; do kill -0 "$step" 2>/dev/null || break; done
"""

# --- shell: words and commands


class Piece(NamedTuple):
    """A part of a word. literal: the shell leaves its `$` alone. split: it stands outside of double quotes."""

    text: str
    literal: bool = False
    split: bool = False
    array: bool = False


class Word(NamedTuple):
    line: int
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def bare(self) -> str:
        """Its text where nothing of it is quoted, so that it can be a keyword."""
        return self.text if all(piece.split and not piece.array for piece in self.pieces) else ""


class ShellCommand(NamedTuple):
    """end: what ends it, "&" or "|" say most. nested: inside of a loop, a condition or a function."""

    line: int
    words: tuple[Word, ...]
    end: str
    nested: bool
    in_function: bool

    @property
    def is_background(self) -> bool:
        return self.end == "&"

    @property
    def is_piped(self) -> bool:
        return self.end in ("|", "|&")


OPERATOR = re.compile(r"&>>?|\d*(?:<<<|<<-?|<&|<>|>>|>&|>\||>(?!\()|<(?!\())|;;&?|;&|&&|\|\||\|&|[;&|()]")
ORDINARY = re.compile(r"[^\s;&|<>()\\'\"$`]+")
REDIRECTION = re.compile(r"&>|\d*[<>]")
OPENING, CLOSING = {"if", "while", "until", "for", "select", "case"}, {"fi", "done", "esac"}


def closed(text: str, at: int) -> int:
    """Where the bracket that opens at `at` has been closed; the text's end where it is not."""
    opening, closing = text[at], {"(": ")", "{": "}"}[text[at]]
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char == "'":
            at = (text.find("'", at + 1) + 1) or len(text)
        elif char == '"':
            at = quote_closed(text, at)
        elif char == "#" and opening == "(" and text[at - 1] in " \t\n(":
            at = (text.find("\n", at) + 1) or len(text)
        else:
            depth += (char == opening) - (char == closing)
            at += 1
            if not depth:
                return at
    return len(text)


def quote_closed(text: str, at: int) -> int:
    """Where the double quote that opens at `at` has been closed."""
    at += 1
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith("$(", at):
            at = closed(text, at + 1)
        elif text[at] == '"':
            return at + 1
        else:
            at += 1
    return len(text)


class Lexer:
    """A shell text as commands."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.at, self.first_line = text, 0, line
        self.breaks = [found.start() for found in re.finditer("\n", text)]
        self.words: list[Word] = []
        self.commands: list[ShellCommand] = []
        self.nesting: list[str] = []
        self.redirection: str | None = None
        self.here_ends: list[str] = []
        self.here_lines: set[int] = set()
        self.defines = False
        self._read()

    def line(self) -> int:
        return self.first_line + bisect.bisect_left(self.breaks, self.at)

    def _read(self) -> None:
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char in " \t\r":
                self.at += 1
            elif char == "\\" and re.match(r"\\\r?\n", text[self.at : self.at + 3]):
                self.at = text.index("\n", self.at) + 1
            elif char == "#":
                self.at = text.find("\n", self.at) if "\n" in text[self.at :] else len(text)
            elif char == "\n":
                self._end("\n")
                self.at += 1
                self._skip_here_documents()
            elif text.startswith("((", self.at) and len(self.words) < 2:
                self.at = closed(text, self.at)
            elif found := OPERATOR.match(text, self.at):
                self._operator(found[0])
            else:
                self._word()
        self._end("")

    def _skip_here_documents(self) -> None:
        for end in self.here_ends:
            while self.at < len(self.text):
                self.here_lines.add(self.line())
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                content = self.text[self.at : stop]
                self.at = stop + 1
                if content.strip("\t\r ") == end:
                    break
        self.here_ends = []

    def _operator(self, found: str) -> None:
        self.at += len(found)
        if REDIRECTION.match(found):
            self.redirection = found.lstrip("0123456789")
        elif found == "(":
            rest = re.match(r"\s*\)", self.text[self.at : self.at + 9])
            if self.words and rest:  # name(): a function
                self.at += rest.end()
                self.words, self.defines = [], True
            elif not self.words:
                self._open("(")
        elif found == ")":
            self._end(")")
            if "(" in self.nesting:
                self._close()
        else:
            self._end(found)

    def _open(self, name: str) -> None:
        self.nesting.append("function" if self.defines else name)
        self.defines = False

    def _close(self) -> None:
        if self.nesting:
            self.nesting.pop()

    def _end(self, end: str) -> None:
        """Close the command, without the keywords that it begins with."""
        words, self.words, self.redirection = self.words, [], None
        while words:
            first = words[0].bare
            if first in OPENING:
                self._open(first)
                if first in ("for", "select", "case"):
                    break
            elif first == "function":
                self.defines = True
                words = words[1:]
            elif first == "{":
                self._open("{")
            elif first in CLOSING or first == "}":
                self._close()
            elif first not in ("then", "do", "else", "elif", "!", "time"):
                break
            words = words[1:]
        if words:
            nested, in_function = bool(self.nesting), "function" in self.nesting
            self.commands.append(ShellCommand(words[0].line, tuple(words), end, nested, in_function))

    def _word(self) -> None:
        line, start = self.line(), self.at
        pieces: list[Piece] = []
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char in "<>" and self.at == start:  # <(...)
                self._piece(pieces, closed(text, self.at + 1), split=True)
            elif char == "(" and pieces and pieces[-1].text.endswith("="):
                end = closed(text, self.at)
                pieces.append(Piece(text[self.at + 1 : end - 1], array=True))
                self.at = end
            elif char in " \t\r\n;&|<>()":
                break
            else:
                self._part(pieces, char)
        word = Word(line, tuple(pieces))
        if self.redirection is None:
            self.words.append(word)
        elif self.redirection in ("<<", "<<-"):
            self.here_ends.append(word.text)
        self.redirection = None

    def _part(self, pieces: list[Piece], char: str) -> None:
        text = self.text
        if char == "\\":
            if text[self.at + 1 : self.at + 2] not in ("\n", ""):
                pieces.append(Piece(text[self.at + 1], literal=True))
            self.at += 2
        elif char == "'" or text.startswith("$'", self.at):
            start = text.index("'", self.at) + 1
            end = text.find("'", start)
            end = len(text) if end < 0 else end
            pieces.append(Piece(text[start:end], literal=True))
            self.at = end + 1
        elif char == '"':
            end = quote_closed(text, self.at)
            pieces.extend(_double_quoted(text[self.at + 1 : end - 1]))
            self.at = end
        elif text.startswith(("$(", "${"), self.at):
            self._piece(pieces, closed(text, self.at + 1), split=True)
        elif char == "`":
            self._piece(pieces, (text.find("`", self.at + 1) + 1) or len(text), split=True)
        elif char == "$":
            name = re.compile(r"\$(\w+|[@*#?$!-])?").match(text, self.at)
            self._piece(pieces, name.end() if name else self.at + 1, split=True)
        else:
            ordinary = ORDINARY.match(text, self.at)
            self._piece(pieces, ordinary.end() if ordinary else self.at + 1, split=True)

    def _piece(self, pieces: list[Piece], end: int, *, split: bool) -> None:
        pieces.append(Piece(self.text[self.at : end], split=split))
        self.at = end


def _double_quoted(text: str) -> Iterator[Piece]:
    yield Piece("")  # a word even where nothing stands in it
    start = 0
    for found in re.finditer(r"\\([$`\"\\]|\r?\n)", text):
        if found.start() >= start:
            yield Piece(text[start : found.start()])
            if not found[1].endswith("\n"):
                yield Piece(found[1], literal=True)
            start = found.end()
    yield Piece(text[start:])


# --- variables

BEGIN, END, SPACE, EARLY = "\ue000", "\ue001", "\ue002", "\ue003"
"""Round what is not known when the script is read; EARLY: a rank that the batch shell fills in, always with 0."""
UNKNOWN = re.compile(f"[{BEGIN}{EARLY}]([^{BEGIN}{EARLY}{END}]*){END}")
RANKS = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
DECLARING = {"export", "declare", "local", "readonly", "typeset"}
LONGEST_VALUE, DEEPEST_VALUE = 20_000, 12


class Assigned(NamedTuple):
    name: str
    word: Word | None
    """None: nobody knows."""
    line: int
    exported: bool
    nested: bool
    prefix: bool = False
    appended: bool = False


def unknown(text: str) -> str:
    return BEGIN + re.sub(r"\s", SPACE, text) + END


def shown(text: str) -> str:
    """A value as the script writes it."""
    return re.sub(f"[{BEGIN}{END}{EARLY}]", "", text).replace(SPACE, " ").strip()


def assignments(command: ShellCommand) -> Iterator[Assigned]:
    """What a command assigns, for itself (prefix) or for the shell."""
    words = command.words
    first = words[0].bare
    if first in ("for", "select") and len(words) > 1:
        yield Assigned(words[1].text, None, command.line, False, True)
    elif first in ("read", "mapfile", "readarray", "getopts", "printf", "let", "unset"):
        for word in words[1:]:
            if re.fullmatch(r"[A-Za-z_]\w*", word.text):
                yield Assigned(word.text, None, command.line, False, command.nested)
    elif first in DECLARING:
        flags = [word.text for word in words[1:] if word.text.startswith("-")]
        exported = first == "export" or any("x" in flag for flag in flags)
        for word in words[1:]:
            yield from _assigned(word, command, exported)
            if exported and re.fullmatch(r"[A-Za-z_]\w*", word.text):
                yield Assigned(word.text, None, command.line, True, command.nested, appended=True)
    else:
        leading = []
        for word in words:
            if not ASSIGNMENT.match(word.text):
                break
            leading.append(word)
        for word in leading:
            for each in _assigned(word, command, False):
                yield each._replace(prefix=len(leading) < len(words))


def _assigned(word: Word, command: ShellCommand, exported: bool) -> Iterator[Assigned]:
    found = ASSIGNMENT.match(word.text)
    if found and word.pieces[0].text.startswith(found[0]):
        first = word.pieces[0]._replace(text=word.pieces[0].text[found.end() :])
        value = Word(word.line, (first, *word.pieces[1:]))
        yield Assigned(found[1], value, command.line, exported, command.nested, appended=bool(found[2]))


class Scope:
    """Variables of the batch shell, or of a shell inside of a step."""

    def __init__(
        self, commands: Sequence[ShellCommand], slurm: Mapping[str, str], parent: Scope | None = None
    ) -> None:
        self.slurm, self.parent = slurm, parent
        self.all = [each for command in commands for each in assignments(command)]
        self.exported = {each.name for each in self.all if each.exported}
        self.values: dict[str, list[Word] | None] = {}
        for each in self.all:
            self._add(each)

    def _add(self, each: Assigned) -> None:
        if each.prefix or (each.word is None and each.appended):
            return
        earlier = self.values.get(each.name)
        if each.word is None or each.nested or (each.name in self.values and not (each.appended and earlier)):
            self.values[each.name] = None
        else:
            self.values[each.name] = [*(earlier or []), each.word]

    def lookup(self, name: str, depth: int) -> str | None:
        """The value of a variable, None where nothing in the script gives it one."""
        if name in self.values:
            words = self.values[name]
            if words is None or depth > DEEPEST_VALUE:
                return unknown(f"${name}")
            return "".join(self.expand(word, depth + 1) for word in words)
        if self.parent is not None and name not in RANKS:
            return self.parent.lookup(name, depth)
        if name in RANKS:
            return unknown(f"${name}") if self.parent is not None else f"{EARLY}${name}{END}"
        return self.slurm.get(name)

    def expand(self, word: Word, depth: int = 0) -> str:
        """The text of a word after the shell has looked at it."""
        parts = []
        for piece in word.pieces:
            if piece.literal:
                parts.append(piece.text)
            elif piece.array:
                inner = Lexer(piece.text).commands
                parts.append(" ".join(self.expand(each, depth + 1) for command in inner for each in command.words))
            else:
                parts.append(self._expand_text(piece.text, depth))
        return "".join(parts)[:LONGEST_VALUE]

    def _expand_text(self, text: str, depth: int) -> str:
        parts, at, size = [], 0, 0
        while at < len(text) and size < LONGEST_VALUE:
            found = re.compile(r"[$`]").search(text, at)
            if not found:
                break
            parts.append(text[at : found.start()])
            at, value = self._one(text, found.start(), depth)
            parts.append(value)
            size += len(value)
        return "".join(parts) + text[at:]

    def _one(self, text: str, at: int, depth: int) -> tuple[int, str]:
        """An expansion that begins at `at`: where it ends, and its value."""
        if text[at] == "`":
            end = (text.find("`", at + 1) + 1) or len(text)
            return end, unknown(text[at:end])
        if text.startswith("$((", at):
            end = closed(text, at + 1)
            return end, self._arithmetic(text[at + 3 : max(end - 2, at + 3)], depth)
        if text.startswith("$(", at):
            end = closed(text, at + 1)
            return end, unknown(text[at:end])
        if text.startswith("${", at):
            end = closed(text, at + 1)
            found = re.fullmatch(r"(\w+)(\[[@*]\])?((?::?[-?]|:?=).*)?", text[at + 2 : end - 1], re.DOTALL)
            value = self.lookup(found[1], depth) if found else None
            return end, value if value is not None else unknown(text[at:end])
        name = re.compile(r"\$(\w+|[@*#?$!-])").match(text, at)
        if not name:
            return at + 1, "$"
        value = self.lookup(name[1], depth)
        return name.end(), value if value is not None else unknown(name[0])

    def _arithmetic(self, text: str, depth: int) -> str:
        def value(found: re.Match[str]) -> str:
            known = self.lookup(found[1], depth + 1)
            return shown(known) if known is not None else found[1]

        if depth > DEEPEST_VALUE:
            return unknown(text)
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)(?::?[-?][^}]*)?\}?", value, text)
        number = arithmetic(filled)
        return unknown(f"$(({filled}))") if number is None else str(number)

    def split(self, words: Sequence[Word]) -> list[str]:
        """Words as a command gets them: unquoted variables and arrays fall into several."""
        found: list[str] = []
        for word in words:
            text = self.expand(word)
            falls_apart = any("$" in piece.text and not piece.literal for piece in word.pieces) and (
                any(piece.split and "$" in piece.text for piece in word.pieces) or "[@]" in word.text
            )
            found.extend(text.split() if falls_apart else [text])
        return found


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def arithmetic(text: str) -> int | None:
    """A sum or product of plain numbers."""
    if len(text) > 80 or not re.fullmatch(r"[\d\s+\-*/%()]+", text):
        return None
    try:
        return _computed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return None


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError("not plain")


def number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None


# --- options of sbatch and srun

SHORT = {
    "A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "C": "constraint", "c": "cpus-per-task",
    "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "i": "input", "J": "job-name",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "S": "core-spec", "t": "time", "w": "nodelist", "x": "exclude", "T": "threads",
    "r": "relative",
}  # fmt: skip
"""Those that take a value."""
WITH_VALUE = {
    *SHORT.values(), "acctg-freq", "batch", "bb", "bbf", "cluster-constraint", "comment", "container", "container-id",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "export", "export-file", "extra", "gid",
    "gpu-bind", "gpu-freq", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint",
    "kill-on-invalid-dep", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu",
    "mincpus", "network", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode",
    "power", "prefer", "priority", "profile", "reservation", "segment", "signal", "sockets-per-node", "switches",
    "tasks-per-node", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-task", "uid",
    "wait-all-nodes", "wckey", "wrap", "workdir",
}  # fmt: skip
WITHOUT_VALUE = {
    "consolidate-segments", "contiguous", "exclusive", "external", "get-user-env", "help", "hold", "ignore-pbs",
    "nice", "no-kill", "no-requeue", "oom-kill-step", "overcommit", "oversubscribe", "parsable", "propagate", "quiet",
    "reboot", "requeue", "resv-ports", "share", "spread-job", "stepmgr", "test-only", "usage", "use-min-nodes",
    "verbose", "version", "wait",
}  # fmt: skip
OF_SRUN = {
    "accel-bind", "bcast-exclude", "cpu-bind", "epilog", "het-group", "jobid", "mpi", "prolog", "slurmd-debug",
    "task-epilog", "task-prolog", "tres-per-node", "wait", "container-image", "container-mounts", "container-workdir",
    "container-name", "container-save", "container-env",
}  # fmt: skip
"""Options of srun with a value, those of its container plugin too."""


class Option(NamedTuple):
    name: str
    value: str | None
    line: int


def read_options(words: Sequence[str], line: int, with_value: set[str]) -> tuple[list[Option], list[str]]:
    """The options that a list of words begins with, and what comes after the first other word."""
    options: list[Option] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        word = words[at]
        at += 1
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            takes = name in with_value
        else:
            name, equals, value = SHORT.get(word[1], word[1]), word[2:], word[2:].removeprefix("=")
            takes = word[1] in SHORT
        if takes and not equals and at < len(words):
            options.append(Option(name, words[at], line))
            at += 1
        else:
            options.append(Option(name, value if equals else None, line))
    return options, list(words[at:])


class Options:
    """Options by name; the last of several counts."""

    def __init__(self, options: Sequence[Option] = ()) -> None:
        self.all = list(options)
        self.by_name = {option.name: option for option in options}

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def text(self, name: str) -> str | None:
        return self.by_name[name].value if name in self.by_name else None

    def number(self, name: str) -> int | None:
        return number(self.text(name))

    def line(self, *names: str) -> int | None:
        return next((self.by_name[name].line for name in names if name in self.by_name), None)

    def gpus(self, nodes: int | None, tasks_per_node: int | None) -> int | None:
        """GPUs on each node, where one option or several say the same."""
        total, per_task = gpu_count(self.text("gpus")), gpu_count(self.text("gpus-per-task"))
        found = {
            gpu_count(self.text("gpus-per-node")),
            gres_gpus(self.text("gres")),
            total // nodes if total and nodes and total % nodes == 0 else None,
            per_task * tasks_per_node if per_task and tasks_per_node else None,
        } - {None}
        return found.pop() if len(found) == 1 else None


def gpu_count(value: str | None) -> int | None:
    """4 of "4" and of "v100:4"."""
    return number(value.rpartition(":")[2]) if value else None


def gres_gpus(value: str | None) -> int | None:
    """4 of "gpu:v100:4,nvme:1"."""
    found = [part for part in (value or "").split(",") if re.match(r"(gres[:/])?gpu([:=]|$)", part)]
    if len(found) != 1:
        return None
    last = re.split("[:=]", re.sub(r"\(.*?\)", "", found[0]))[-1]
    return number(last) if last.isdecimal() else 1


# --- what is launched

FLAGS = {
    "cpu", "multi_gpu", "tpu", "ipex", "quiet", "debug", "use_deepspeed", "use_fsdp", "use_parallelism_config",
    "use_megatron_lm", "use_xpu", "use_cpu", "module", "no_python", "same_network", "tpu_use_cluster", "no_tpu_use_cluster",
    "tpu_use_sudo", "enable_cpu_affinity", "standalone", "run_path", "virtual_local_rank", "m", "q", "no_local_rank",
    "no_ssh", "force_multi", "use_env",
}  # fmt: skip
SHELLS = re.compile(r"(ba|z|da|k)?sh")
NOT_LAUNCHING = {
    "echo", "printf", "which", "type", "pip", "pip3", "ls", "cat", "module", "ml", "sed", "grep", "awk", "hash",
    "source", ".", "cd", "mkdir", "rm", "cp", "mv", "rsync", "kill", "pkill", "apt", "apt-get", "trap", "alias",
    "export", "readonly", "declare", "local", "typeset", "for", "case", "select", "test", "[", "[[",
}  # fmt: skip
PREFIXES = {"exec", "nohup", "command", "env", "time", "stdbuf", "nice", "builtin"}


@dataclass
class Launch:
    """A launcher or a Python program. kind: accelerate, torchrun, deepspeed or python. complete: no further options
    can hide in a variable. arguments: of the program."""

    kind: str
    line: int
    options: dict[str, str] = field(default_factory=dict)
    program: str = ""
    arguments: list[str] = field(default_factory=list)
    complete: bool = True
    command: ShellCommand | None = None
    step: Step | None = None

    @property
    def is_launcher(self) -> bool:
        return self.kind != "python"


def find_launch(words: Sequence[str], line: int) -> Launch | None:
    start = _command_at(words)
    rest = list(words[start:])
    if not rest or PurePosixPath(rest[0]).name in NOT_LAUNCHING:
        return None
    if rest[0] in ("conda", "mamba", "micromamba", "uv", "poetry") and "run" not in rest[1:3]:
        return None
    for at, word in enumerate(rest):
        name = PurePosixPath(word).name
        following = rest[at + 1] if at + 1 < len(rest) else ""
        if name == "accelerate" and following == "launch":
            return _launcher("accelerate", rest[at + 2 :], line)
        if name in ("accelerate-launch", "torchrun"):
            return _launcher("accelerate" if "accelerate" in name else "torchrun", rest[at + 1 :], line)
        if word == "-m" and following in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
            return _launcher("accelerate", rest[at + 2 :], line)
        if word == "-m" and following in ("torch.distributed.run", "torch.distributed.launch"):
            return _launcher("torchrun", rest[at + 2 :], line)
        if name == "deepspeed" and at == 0:
            return _launcher("deepspeed", rest[1:], line)
        if re.fullmatch(r"python[\d.]*", name) and not _launches_later(rest[at:]):
            return _python(rest[at + 1 :], line)
    return None


def _launches_later(words: Sequence[str]) -> bool:
    """Whether a Python command line starts a launcher as its module."""
    modules = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli", "torch.distributed.run",
               "torch.distributed.launch")  # fmt: skip
    return any(word in modules for word in words[:8])


def _command_at(words: Sequence[str]) -> int:
    at = 0
    while at < len(words):
        if words[at] in PREFIXES or ASSIGNMENT.match(words[at]) or (at and words[at].startswith("-")):
            at += 1
        elif words[at] in ("timeout", "numactl", "taskset") and at + 1 < len(words):
            at += 1
            while at < len(words) and re.match(r"[-\d]", words[at]):
                at += 1
        else:
            return at
    return at


def _launcher(kind: str, words: Sequence[str], line: int) -> Launch:
    launch = Launch(kind, line)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-"):
            if UNKNOWN.fullmatch(word) and not re.search(r"\.py|script|main|train|program", word, re.IGNORECASE):
                launch.complete = False
                continue
            launch.program, launch.arguments = word, list(words[at:])
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not equals and name not in FLAGS and at < len(words):
            value = words[at]
            at += 1
        launch.options[name] = value
    return launch


def _python(words: Sequence[str], line: int) -> Launch | None:
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "-m" and at + 1 < len(words):
            return Launch("python", line, program=words[at + 1], arguments=list(words[at + 2 :]))
        if words[at] in ("-c", "-", "-V", "--version"):
            return None
        at += 2 if words[at] in ("-W", "-X") else 1
    return Launch("python", line, program=words[at], arguments=list(words[at + 1 :])) if at < len(words) else None


@dataclass
class Step:
    """An srun. words: what stands after its own options. shell: the text of `bash -c`, and its commands. own: its
    own options. nodes, tasks (per node), gpus (per node): None where not known."""

    line: int
    command: ShellCommand
    own: Options
    words: list[str]
    early: str
    nodes: int | None
    tasks: int | None
    gpus: int | None
    shell: str | None = None
    commands: list[ShellCommand] = field(default_factory=list)
    scope: Scope | None = None
    launches: list[Launch] = field(default_factory=list)

    @property
    def is_single(self) -> bool:
        return self.nodes == 1 and self.tasks == 1


class Job:
    """A job script. kind of knowledge: `shebang` as written; `options` of its #SBATCH lines before the first command;
    `late` and `comments`: lines that look like such, and are none."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.lines = self.text.split("\n")
        self.shebang = self.lines[0] if self.lines[0].startswith("#!") else ""
        self.is_shell = not self.shebang or bool(re.search(r"\b(ba|z|da|k)?sh\b", self.shebang))
        lexer = Lexer(self.text if self.is_shell else "")
        self.commands = lexer.commands
        self.directives: list[tuple[int, str]] = []
        self.late: list[int] = []
        self.comments: list[tuple[int, str]] = []
        self._read_directives(lexer.here_lines)
        self.stray: list[tuple[Option | None, str, int]] = []
        self.options = Options(self._read_options())
        self._count()
        self.scope = Scope(self.commands, self._slurm())
        self.steps: list[Step] = []
        self.launches: list[Launch] = []
        for command in self.commands:
            self._read_command(command)

    def _read_directives(self, here_lines: set[int]) -> None:
        header = True
        for line, text in enumerate(self.lines, 1):
            if line in here_lines:
                continue
            if text.startswith("#SBATCH") and re.match(r"[\s\-]", text[7:8] or " "):
                if header:
                    self.directives.append((line, text[7:]))
                elif re.match(r"\s*-", text[7:]):
                    self.late.append(line)
            elif text.strip() and not text.lstrip().startswith("#"):
                header = False
            elif header and re.match(r"\s*#\s*sbatch\s+-", text, re.IGNORECASE):
                self.comments.append((line, text))

    def _read_options(self) -> Iterator[Option]:
        for line, text in self.directives:
            rest = [word.strip("\"'") for word in directive_words(text)]
            last: Option | None = None
            while rest:
                options, rest = read_options(rest, line, WITH_VALUE)
                yield from options
                last = options[-1] if options else last
                if rest:
                    self.stray.append((last, rest[0], line))
                    rest = rest[1:]

    def _count(self) -> None:
        """Nodes, tasks per node and GPUs per node, as far as the directives say."""
        options = self.options
        self.is_exclusive = "exclusive" in options
        nodes, ntasks = options.text("nodes") or "", options.number("ntasks")
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", nodes)
        self.nodes = int(found[1]) if found and found[2] in (None, found[1]) else None
        self.nodes_range = nodes if found and self.nodes is None else None
        per_node = options.number("ntasks-per-node") or options.number("tasks-per-node")
        if not nodes and ntasks and per_node and ntasks % per_node == 0:
            self.nodes = ntasks // per_node
        if any(word in ("hetjob", "packjob") for _, word, _ in self.stray):
            self.nodes = self.nodes_range = self.tasks = self.gpus = None
            return
        self.tasks = per_node
        if ntasks:
            spread = -(-ntasks // (self.nodes or 1))
            self.tasks = min(spread, per_node or spread)
        elif per_node is None and "ntasks-per-gpu" not in options:
            self.tasks = 1
        self.gpus = options.gpus(self.nodes or (None if nodes else 1), self.tasks)
        per_gpu = options.number("ntasks-per-gpu")
        if self.tasks is None and per_gpu and self.gpus:
            self.tasks = per_gpu * self.gpus

    def _slurm(self) -> dict[str, str]:
        tasks = self.nodes * self.tasks if self.nodes and self.tasks else None
        given = "gpus-per-node" in self.options
        known = {
            "SLURM_NNODES": self.nodes,
            "SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_GPUS_ON_NODE": self.gpus,
            "SLURM_GPUS_PER_NODE": self.gpus if given else None,
            "SLURM_NTASKS": tasks,
            "SLURM_NPROCS": tasks,
            "SLURM_NTASKS_PER_NODE": self.options.number("ntasks-per-node"),
            "SLURM_CPUS_PER_TASK": self.options.number("cpus-per-task"),
        }
        return {name: str(value) for name, value in known.items() if value is not None}

    def _read_command(self, command: ShellCommand) -> None:
        words = self.scope.split(command.words)
        if words and words[0] == "eval":
            inner = Lexer(" ".join(words[1:]), command.line).commands
            words = self.scope.split(inner[0].words) if inner else []
        at = _command_at(words)
        if at < len(words) and PurePosixPath(words[at]).name == "srun":
            step = self._step(command, words[at + 1 :])
            self.steps.append(step)
            self.launches.extend(step.launches)
        elif launch := find_launch(words, command.line):
            launch.command = command
            self.launches.append(launch)

    def _step(self, command: ShellCommand, words: Sequence[str]) -> Step:
        options, rest = read_options(words, command.line, WITH_VALUE | OF_SRUN)
        own = Options(options)
        nodes, tasks = self._shape(own)
        gpus = own.gpus(nodes, tasks) or (None if {"gpus", "gpus-per-task"} & set(own.by_name) else self.gpus)
        early = next((found[1] for found in re.finditer(f"{EARLY}(.*?){END}", " ".join(words))), "")
        step = Step(command.line, command, own, rest, early, nodes, tasks, gpus)
        for at, word in enumerate(rest[:-1]):
            if SHELLS.fullmatch(PurePosixPath(word).name) and re.fullmatch(r"-[a-z]*c", rest[at + 1]):
                step.shell = rest[at + 2] if at + 2 < len(rest) else ""
                break
        if step.shell is None:
            launch = find_launch(rest, command.line)
            step.launches = [launch] if launch else []
        else:
            self._read_shell(step)
        for launch in step.launches:
            launch.step, launch.command = step, launch.command or command
        return step

    def _read_shell(self, step: Step) -> None:
        line = step.command.line
        for word in step.command.words:
            if "\n" in word.text:
                line = word.line
        step.commands = Lexer(step.shell or "", line).commands
        step.scope = Scope(step.commands, self._slurm(), self.scope)
        for command in step.commands:
            launch = find_launch(step.scope.split(command.words), command.line)
            if launch:
                launch.command = command
                step.launches.append(launch)

    def _shape(self, own: Options) -> tuple[int | None, int | None]:
        """Nodes and tasks per node of a step."""
        count, per_node = own.number("ntasks"), own.number("ntasks-per-node")
        nodes = own.number("nodes") if "nodes" in own else 1 if count == 1 else self.nodes
        if "ntasks-per-node" in own:
            return nodes, per_node
        if "ntasks" in own:
            return nodes, -(-count // nodes) if count and nodes else None
        if "nodes" in own and own.number("nodes") != self.nodes and "ntasks" in self.options:
            return nodes, None
        return nodes, self.tasks

    @cached_property
    def code(self) -> str:
        """All words of all commands, so without comments."""
        return "\n".join(" ".join(word.text for word in command.words) for command in self.commands)

    @property
    def is_job(self) -> bool:
        return bool(self.directives)

    def nodes_of(self, launch: Launch) -> int | None:
        """How many nodes run a launch; None where not known."""
        if launch.step:
            return launch.step.nodes
        if self.steps or self.calls_elsewhere:
            return None
        return 1 if self.nodes == 1 else None

    def gpus_of(self, launch: Launch) -> int | None:
        return launch.step.gpus if launch.step else self.gpus

    @cached_property
    def calls_elsewhere(self) -> bool:
        """Whether something may reach other nodes in a way that is not followed here."""
        words = r"\b(srun|mpirun|mpiexec\w*|pdsh|clush|ssh|ray|dask\w*|parallel|sbatch|submitit|orterun|prun|jsrun|flux)\b"
        return bool(re.search(words, self.code) or re.search(r"\bhostfile", self.code))

    @cached_property
    def trains(self) -> bool:
        return any(launch.is_launcher for launch in self.launches) or bool(self.launches and self.gpus)

    @cached_property
    def shares_gpus(self) -> bool:
        """Whether several launches, or loops, use the GPUs in parts."""
        several = len([launch for launch in self.launches if launch.is_launcher]) > 1
        nested = any(launch.command and (launch.command.nested or launch.command.is_background)
                     for launch in self.launches if not launch.step)  # fmt: skip
        steps = any(step.command.nested or (step.command.is_background and len(self.steps) > 1) for step in self.steps)
        return several or nested or steps or "CUDA_VISIBLE_DEVICES" in self.code


def directive_words(text: str) -> list[str]:
    """Words of a directive, up to a comment."""
    found = []
    for word in re.finditer(r"#.*|(?:[^\s\"'#\\]|\"[^\"]*\"|'[^']*'|\\.|[\"'\\])+", text):
        if word[0].startswith("#"):
            break
        found.append(word[0].replace('"', "").replace("'", "") if not word[0].startswith(("'", '"')) else word[0])
    return found


@lru_cache(maxsize=64)
def _job(text: str) -> Job | None:
    try:
        return Job(text)
    except RecursionError:
        return None


def job_of(document: Document) -> Job | None:
    """The script, or None where it is none: a Python file that speaks of sbatch, or brackets without end."""
    if document.path.endswith(".py"):
        return None
    return _job(document.text)
