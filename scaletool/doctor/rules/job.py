"""A job script: its #SBATCH lines, what they ask for, its steps, and what these launch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import PurePosixPath
from typing import NamedTuple

from scaletool.doctor.documents import Document
from scaletool.doctor.rules.shell import ASSIGNMENT, EARLY, END, UNKNOWN, Lexer, Scope, ShellCommand, number

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
    "cpu", "multi_gpu", "tpu", "ipex", "dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation",
    "tpu_cluster", "quiet", "debug", "use_deepspeed", "use_fsdp", "use_parallelism_config", "use_megatron_lm",
    "use_xpu", "use_cpu", "module", "no_python", "same_network", "tpu_use_cluster", "no_tpu_use_cluster",
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
        self.options = Options(list(self._read_options()))
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
            rest = directive_words(text)
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
        words = (
            r"\b(srun|mpirun|mpiexec\w*|pdsh|clush|ssh|ray|dask\w*|parallel|sbatch|submitit|orterun|prun|jsrun|flux)\b"
        )
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
        found.append(re.sub("[\"']", "", word[0]))
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
