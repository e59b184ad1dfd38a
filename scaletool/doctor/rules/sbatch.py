"""Rules over job scripts for sbatch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Context, Problem, rule
from scaletool.doctor.rules.job import (
    OF_SRUN,
    WITH_VALUE,
    WITHOUT_VALUE,
    Job,
    Launch,
    directive_words,
    gpu_count,
    job_of,
)
from scaletool.doctor.rules.shell import EARLY, UNKNOWN, number, shown

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


class Setting(NamedTuple):
    """A value of a launch. sure: it is this one, or certainly none."""

    value: str | None
    sure: bool

    @property
    def number(self) -> int | None:
        return number(self.value)

    @property
    def missing(self) -> bool:
        return self.value is None and self.sure


def config_of(launch: Launch, context: Context) -> Document | None:
    """The accelerate config that a launch names, where it was given too."""
    named = launch.options.get("config_file")
    if launch.kind != "accelerate" or named is None:
        return None
    given = context.of("accelerate")
    if UNKNOWN.search(named):
        return given[0] if len(given) == 1 else None
    same = [each for each in given if PurePosixPath(each.path).name == PurePosixPath(named).name]
    return same[0] if len(same) == 1 else None


def setting(launch: Launch, context: Context, *names: str) -> Setting:
    """The first of `names` on the command line, else that of the config it names."""
    for name in names:
        if name in launch.options:
            return Setting(launch.options[name], True)
    if not launch.complete:
        return Setting(None, False)
    if "config_file" in launch.options:
        config = config_of(launch, context)
        if config is None:
            return Setting(None, False)
        value = config.get(names[0])
        plain = isinstance(value, int | str) and not isinstance(value, bool)
        return Setting(str(value) if plain else None, plain or value is None)
    return Setting(None, True)


def launches(job: Job, *kinds: str) -> Iterator[Launch]:
    return (each for each in job.launches if not kinds or each.kind in kinds)


def on_several_nodes(job: Job, *kinds: str) -> Iterator[Launch]:
    """Launches of steps that run on more than one node, which is certain."""
    return (each for each in launches(job, *kinds) if each.step and (each.step.nodes or 1) > 1)


TRAINING = re.compile("train|tune", re.IGNORECASE)
"""In the name of a Python program."""


def counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


# --- the file and its directives


@rule("sbatch-line-endings", "error", "sbatch", bad=GOOD.replace("\n", "\r\n"), good=GOOD)
def line_endings(script: Document, context: Context) -> Iterator[Problem]:
    """sbatch refuses scripts with the line endings of Windows: "Batch script contains DOS line breaks"."""
    if "\r\n" in script.text and (job := job_of(script)) and (job.is_job or job.shebang):
        line = script.text[: script.text.index("\r\n")].count("\n") + 1
        yield Problem(line, "the lines end with CR LF, sbatch refuses the script", "run: sed -i 's/\\r$//' FILE")


@rule("sbatch-shebang", "error", "sbatch", bad=GOOD.removeprefix("#!/bin/bash\n"), good=GOOD)
def shebang(script: Document, context: Context) -> Iterator[Problem]:
    """sbatch refuses a script whose very first characters are not #!: "This does not look like a batch script"."""
    job = job_of(script)
    if job and job.is_job and not job.shebang and not _is_python(script):
        yield Problem(1, f"the first line is no shebang, but {job.lines[0][:40]!r}", "make #!/bin/bash the first line")


def _is_python(script: Document) -> bool:
    return bool(re.search(r"^(import |from \w[\w.]* import |def \w+\(.*\).*:)", script.text, re.MULTILINE))


@rule(
    "sbatch-directive-is-comment",
    "warning",
    "sbatch",
    bad=GOOD.replace("#SBATCH --nodes", "#sbatch --nodes"),
    good=GOOD,
    link="ACEsuit/mace#435",
)
def directive_is_comment(script: Document, context: Context) -> Iterator[Problem]:
    """Only lines that begin with #SBATCH, in capitals and without a space, are read. Others are comments, and the job
    gets the defaults of the partition."""
    job = job_of(script)
    if not job or _is_python(script):
        return
    for line, text in job.comments:
        options = directive_words(text.lstrip()[1:].lstrip()[6:])
        name = re.split("[= ]", options[0])[0] if options else ""
        usage = re.search(r"\S+\.(sh|sbatch|slurm|job|bash|batch)\b", text) and "#SBATCH" not in text.upper()
        spaced = text.startswith("# ")
        switched_off = spaced and (name.lstrip("-") in job.options or re.match(r"\s*# sbatch", text))
        if not usage and not switched_off:
            cause = "in lower case" if "SBATCH" not in text else "not #SBATCH at the start of the line"
            message = f"line {line} is a comment for Slurm, {cause}: {text.strip()}"
            yield Problem(line, message, f"write #SBATCH {' '.join(options)}, or ##SBATCH to switch it off")


@rule(
    "sbatch-directive-too-late",
    "error",
    "sbatch",
    bad=GOOD.replace("#SBATCH --gpus-per-node=4\n", "").replace("srun", "#SBATCH --gpus-per-node=4\nsrun"),
    good=GOOD,
)
def directive_too_late(script: Document, context: Context) -> Iterator[Problem]:
    """sbatch stops reading directives at the first command; later ones are comments."""
    job = job_of(script)
    for line in job.late if job and job.is_shell else ():
        text = job.lines[line - 1].strip() if job else ""
        yield Problem(line, f"after the first command, so Slurm ignores it: {text}", "move it up, above all commands")


@rule(
    "sbatch-variable-in-directive",
    "error",
    "sbatch",
    bad=GOOD.replace("%x-%j.out", "$HOME/logs/%j.out"),
    good=GOOD,
)
def variable_in_directive(script: Document, context: Context) -> Iterator[Problem]:
    """#SBATCH lines are read before any shell sees them: a variable stays as its name, in file names too."""
    job = job_of(script)
    for option in job.options.all if job else ():
        found = re.search(r"\$\{?\w+\}?|\$\(|`", option.value or "")
        if found and option.name != "wrap":
            message = f"--{option.name}={option.value}: {found[0]} is not filled in, Slurm takes it as it stands"
            fix = "use Slurm's own patterns in file names (%j job, %x name, %u user), or give it to sbatch as an option"
            yield Problem(option.line, message, fix)


KNOWN = WITH_VALUE | WITHOUT_VALUE
COUNTS = {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node", "gpus-per-task",
          "ntasks-per-gpu", "cpus-per-gpu"}  # fmt: skip
ONE_VALUE = {"time", "partition", "gres", "mem", "output", "error", "job-name", "array", "signal", "constraint", "qos"}
PLACEHOLDER = re.compile(r"[<>{}@$]|\.\.\.|XX|__")


@rule(
    "sbatch-unknown-option",
    "error",
    "sbatch",
    bad=GOOD.replace("--gpus-per-node", "--gpu-per-node"),
    good=GOOD,
)
def unknown_option(script: Document, context: Context) -> Iterator[Problem]:
    """sbatch refuses a script with an option that it does not know."""
    job = job_of(script)
    for option in job.options.all if job else ():
        if len(option.name) > 1 and option.name not in KNOWN | OF_SRUN:
            shortened = [name for name in KNOWN if name.startswith(option.name)]
            near = difflib.get_close_matches(option.name.replace("_", "-"), sorted(KNOWN), 1, 0.85)
            if near and len(shortened) != 1:
                yield Problem(option.line, f"sbatch knows no --{option.name}", f"write --{near[0]}")


@rule(
    "sbatch-option-value",
    "error",
    "sbatch",
    bad=GOOD.replace("--gpus-per-node=4", "--gpus-per-node=four"),
    good=GOOD,
)
def option_value(script: Document, context: Context) -> Iterator[Problem]:
    """sbatch refuses counts, times and devices that it cannot read, and takes an empty value where a space stands
    beside the equals sign."""
    job = job_of(script)
    for option in job.options.all if job else ():
        value = option.value or ""
        if PLACEHOLDER.search(value) or (option.value is None and option.name not in WITH_VALUE):
            continue
        cause = _wrong_value(option.name, value)
        if cause:
            yield Problem(option.line, f"--{option.name}={value}: {cause[0]}", cause[1])


def _wrong_value(name: str, value: str) -> tuple[str, str] | None:
    if name in COUNTS | {"time", "gres", "mem", "signal"} and value in ("", "="):
        return "no value, a space stands beside the =", f"write --{name}=VALUE without spaces"
    if name in ("ntasks", "ntasks-per-node", "cpus-per-task", "ntasks-per-gpu", "cpus-per-gpu"):
        if not re.fullmatch(r"\d+", value):
            return "not a number", "write a whole number"
    elif name == "nodes" and not re.fullmatch(r"\d+[kKmM]?([-,:]\d+[kKmM]?)*", value) and "/" not in value:
        return "not a number of nodes", "write a whole number, or a list of nodes under --nodelist"
    elif name in ("gpus", "gpus-per-node", "gpus-per-task") and "," not in value:
        words = {"all", "auto", "one", "two", "three", "four", "six", "eight", "gpu"}
        if (":" in value and not value.rpartition(":")[2].isdecimal()) or value.lower() in words:
            return "no number of GPUs", f"write --{name}=NUMBER or --{name}=TYPE:NUMBER"
        if value.startswith("gpu:"):
            return "`gpu` is taken for the type of the GPU", f"write --{name}={value.removeprefix('gpu:')}"
    elif name == "gres" and "," not in value:
        if re.fullmatch(r"\d+|gpus:.*|gpu:[\w.-]+:[A-Za-z]\w*|gpu:(one|two|four|six|eight)", value):
            return "no device that Slurm knows", "write --gres=gpu:NUMBER or --gres=gpu:TYPE:NUMBER"
    elif name == "time" and not TIME.fullmatch(value):
        return "not a time", "write HOURS:MINUTES:SECONDS, DAYS-HOURS, or minutes"
    elif name == "signal" and not SIGNAL.fullmatch(value):
        return "not a signal", "write --signal=B:USR1@180 or --signal=TERM@180"
    return None


TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|-1|infinite|unlimited", re.IGNORECASE)
SIGNAL = re.compile(
    r"(?:(?P<where>[RB]{1,2}):)?(?:SIG)?(?P<name>\d+|HUP|INT|QUIT|ABRT|KILL|ALRM|TERM|USR1|USR2|URG|CONT|STOP|TSTP"
    r"|TTIN|TTOU|XCPU)(?:@(?P<seconds>\d+))?",
    re.IGNORECASE,
)


@rule(
    "sbatch-stray-word",
    "warning",
    "sbatch",
    bad=GOOD.replace("--job-name=t5-base", "--job-name=t5 base"),
    good=GOOD,
)
def stray_word(script: Document, context: Context) -> Iterator[Problem]:
    """Words in a directive that belong to no option are dropped without a word: what follows a space in a name, or an
    option without its dashes."""
    job = job_of(script)
    for option, word, line in job.stray if job else ():
        name = re.split("[= ]", word)[0]
        if word.startswith("=") or (option is not None and (option.value or "").endswith("=")):
            yield Problem(
                line, f"a space beside the = of {job.lines[line - 1].strip() if job else ''}", "drop the space"
            )
        elif name in KNOWN and "=" in word:
            yield Problem(line, f"{word} is no option and is ignored", f"write --{word}", severity="error")
        elif option is not None and option.name in ("job-name", "comment", "output", "error"):
            message = f"--{option.name} ends at the space, {word!r} is dropped"
            yield Problem(line, message, f'quote it: --{option.name}="{option.value} {word}"')


@rule(
    "sbatch-option-twice",
    "warning",
    "sbatch",
    bad=GOOD.replace("#SBATCH --nodes=1\n", "#SBATCH --nodes=1\n#SBATCH -N 2\n").replace("srun", "srun --nodes=1"),
    good=GOOD,
)
def option_twice(script: Document, context: Context) -> Iterator[Problem]:
    """Of an option that is given twice the last one counts, without a word."""
    job = job_of(script)
    if not job or any(word in ("hetjob", "packjob") for _, word, _ in job.stray):
        return
    first: dict[str, tuple[str | None, int]] = {}
    for option in job.options.all:
        value, line = first.setdefault(option.name, (option.value, option.line))
        if value != option.value and option.name in COUNTS | ONE_VALUE:
            message = f"--{option.name} is {value} at line {line} and {option.value} here, which counts"
            yield Problem(option.line, message, "keep one of them")


@rule(
    "sbatch-tasks-below-nodes",
    "error",
    "sbatch",
    bad=GOOD_TWO.replace("--ntasks-per-node=1", "--ntasks=1").replace("srun", "srun --nodes=1"),
    good=GOOD_TWO,
)
def tasks_below_nodes(script: Document, context: Context) -> Iterator[Problem]:
    """A job with fewer tasks than nodes gets only as many nodes as tasks; sbatch warns on the terminal and goes on."""
    job = job_of(script)
    if job and job.nodes and "nodes" in job.options:
        tasks = job.options.number("ntasks")
        if tasks and tasks < job.nodes:
            message = f"--ntasks={tasks} for {job.nodes} nodes: the job gets {counted(tasks, 'node')}"
            yield Problem(job.options.line("ntasks"), message, "write --ntasks-per-node=1 instead of --ntasks")


@rule(
    "sbatch-nodes-range",
    "warning",
    "sbatch",
    bad=GOOD_TWO.replace("--nodes=2", "--nodes=1-2"),
    good=GOOD_TWO,
)
def nodes_range(script: Document, context: Context) -> Iterator[Problem]:
    """With a range Slurm gives as many nodes as are free, but the launch line counts on one number."""
    job = job_of(script)
    if not job or not job.nodes_range:
        return
    for launch in launches(job, "accelerate", "torchrun"):
        for name in ("num_machines", "num_processes", "nnodes"):
            fixed = number(launch.options.get(name))
            if fixed and fixed > 1:
                message = f"--nodes={job.nodes_range} may give any of these, but {name} is always {fixed}"
                fix = "ask for one number of nodes, or compute from $SLURM_NNODES"
                yield Problem(job.options.line("nodes"), message, fix)
                return


# --- ranks, launchers and counts


@rule(
    "sbatch-rank-too-early",
    "error",
    "sbatch",
    bad=GOOD_TWO.replace("bash -c '", 'bash -c "')
    .replace("train.py'", 'train.py"')
    .replace(' "$', " $")
    .replace('" ', " "),
    good=GOOD_TWO,
    link="ContextualAI/gritlm#62",
)
def rank_too_early(script: Document, context: Context) -> Iterator[Problem]:
    """In the batch script SLURM_NODEID and SLURM_PROCID are always 0; they differ only inside of the step. Written
    outside of single quotes they are filled in before srun starts, so every node gets rank 0."""
    job = job_of(script)
    for step in job.steps if job else ():
        name = step.early.lstrip("$")
        if not name or (step.nodes == 1 if name == "SLURM_NODEID" else step.is_single):
            continue
        certain = (step.nodes or 0) > 1 or (step.tasks or 0) > 1 or not (job and job.is_job)
        message = f"${name} is filled in by the batch shell, before srun: it is 0 on every node"
        fix = f"let the step fill it in: srun bash -c '... ${name} ...' in single quotes, as for --machine_rank"
        yield Problem(step.line, message, fix, severity=None if certain else "warning")
    for launch in launches(job, "accelerate", "torchrun") if job else ():
        value = launch.options.get("machine_rank", launch.options.get("node_rank", ""))
        if launch.step and launch.step.shell is None and re.search(r"\$\{?SLURM_\w+", UNKNOWN.sub("", value)):
            message = f"machine_rank gets the text {value}: no shell stands between srun and the launcher to fill it in"
            yield Problem(launch.line, message, "put the launcher into srun bash -c '...'")


@rule(
    "sbatch-exported-rank",
    "error",
    "sbatch",
    bad=GOOD_TWO.replace("set -e", "export RANK=$SLURM_PROCID\nset -e").replace("srun", "srun --ntasks-per-node=1"),
    good=GOOD_TWO,
)
def exported_rank(script: Document, context: Context) -> Iterator[Problem]:
    """A rank that the batch script exports is 0, and every task of every step inherits it."""
    job = job_of(script)
    if not job:
        return
    several = [step for step in job.steps if (step.nodes or 1) * (step.tasks or 1) > 1 and step.launches]
    for each in job.scope.all:
        if (
            each.exported
            and each.word
            and each.name in ("RANK", "LOCAL_RANK", "NODE_RANK", "MACHINE_RANK", "GROUP_RANK")
        ):
            inside = [step for step in several if not (step.scope and each.name in step.scope.values)]
            if EARLY in job.scope.expand(each.word) and inside and not any(step.early for step in inside):
                message = f"{each.name}={each.word.text} is filled in by the batch shell: 0 for every task of the step"
                yield Problem(each.line, message, "set it inside of srun bash -c '...', from the step's own variables")


@rule(
    "sbatch-launcher-per-task",
    "error",
    "sbatch",
    bad=GOOD.replace("--ntasks-per-node=1", "--ntasks-per-node=4"),
    good=GOOD,
)
def launcher_per_task(script: Document, context: Context) -> Iterator[Problem]:
    """srun starts its command once per task. accelerate launch and torchrun start all processes of a node themselves,
    so there has to be one task per node; else several launchers fight for the port and the GPUs."""
    job = job_of(script)
    for launch in launches(job, "accelerate", "torchrun", "deepspeed") if job else ():
        step = launch.step
        if not step or (step.tasks or 1) < 2 or "SLURM_LOCALID" in (step.shell or ""):
            continue
        tasks = step.tasks or 1
        machines = setting(launch, context, "num_machines", "nnodes")
        if launch.options.get("nproc_per_node") == "1" or machines.number == tasks * (step.nodes or 1):
            continue
        if UNKNOWN.search(machines.value or "") and re.search("SLURM_(NTASKS|NPROCS)", machines.value or ""):
            continue
        name = {"accelerate": "accelerate launch"}.get(launch.kind, launch.kind)
        message = f"srun starts {name} {tasks} times per node, once per task; each starts all processes again"
        yield Problem(launch.line, message, "write #SBATCH --ntasks-per-node=1 (or srun --ntasks-per-node=1)")


@rule(
    "sbatch-launcher-under-mpirun",
    "error",
    "sbatch",
    bad=GOOD.replace("srun ", "mpirun -np 4 "),
    good=GOOD,
)
def launcher_under_mpirun(script: Document, context: Context) -> Iterator[Problem]:
    """mpirun starts its command once per rank, and accelerate launch and torchrun start all processes of a node
    themselves: several of them fight for the port and the GPUs."""
    job = job_of(script)
    for launch in launches(job, "accelerate", "torchrun", "deepspeed") if job and job.is_job else ():
        words = [word.text for word in launch.command.words] if launch.command and not launch.step else []
        if words and words[0] in ("mpirun", "mpiexec", "orterun"):
            ranks = [number(value) for name, value in pairwise(words) if name in ("-n", "-np", "--np")]
            if ranks and ranks[0] and ranks[0] > (job.nodes or 1 if job else 1):
                message = f"{words[0]} starts {launch.kind} {ranks[0]} times, and each starts all processes again"
                yield Problem(launch.line, message, "start it with srun, one task per node")


@rule(
    "sbatch-no-srun",
    "error",
    "sbatch",
    bad=GOOD.replace("--nodes=1", "--nodes=2").replace("srun ", ""),
    good=GOOD,
)
def no_srun(script: Document, context: Context) -> Iterator[Problem]:
    """A batch script runs on the first node only. Without srun the other nodes are paid for and idle."""
    job = job_of(script)
    if not job or (job.nodes or 1) < 2 or job.steps or job.calls_elsewhere:
        return
    for launch in launches(job):
        if launch.is_launcher or TRAINING.search(launch.program):
            name = {"accelerate": "accelerate launch"}.get(launch.kind, launch.kind)
            message = f"{name} runs on the first of {job.nodes} nodes only: nothing starts it on the others"
            fix = "start it with srun: srun --kill-on-bad-exit=1 bash -c '... --machine_rank $SLURM_NODEID ...'"
            yield Problem(launch.line, message, fix)
            return


@rule(
    "sbatch-num-machines",
    "error",
    "sbatch",
    bad=GOOD_TWO.replace("--num_machines 2 ", ""),
    good=GOOD_TWO,
)
def num_machines(script: Document, context: Context) -> Iterator[Problem]:
    """num_machines (nnodes of torchrun) is 1 unless it is said: then every node trains a copy of its own. With more
    machines than nodes the launcher waits for one that never comes."""
    job = job_of(script)
    for launch in launches(job, "accelerate", "torchrun") if job else ():
        nodes = job.nodes_of(launch) if job else None
        if nodes is None or (nodes == 1 and launch.step and launch.step.nodes != 1):
            continue
        name = "num_machines" if launch.kind == "accelerate" else "nnodes"
        given = setting(launch, context, name)
        fix = f"write --{name}=$SLURM_NNODES (--{name} {nodes})"
        if nodes > 1 and "standalone" in launch.options:
            yield Problem(launch.line, f"--standalone on {nodes} nodes: each is a world of its own", "drop it; " + fix)
        elif nodes > 1 and given.missing:
            yield Problem(
                launch.line, f"{name} is not given on {nodes} nodes, so each node trains a copy of its own", fix
            )
        elif given.number is not None and given.number != nodes and not _is_one_task(launch, nodes):
            message = f"{name} is {given.number}, but the launch runs on {counted(nodes, 'node')}"
            yield Problem(launch.line, message, fix)


def _is_one_task(launch: Launch, nodes: int) -> bool:
    """Whether every task counts as a machine, so that there may be more of these than nodes."""
    return bool(launch.step and (launch.step.tasks or 2) > 1)


@rule(
    "sbatch-num-processes",
    "error",
    "sbatch",
    bad=GOOD_TWO.replace("--num_processes 16", "--num_processes 8"),
    good=GOOD_TWO,
    link="huggingface/accelerate#2521",
)
def num_processes(script: Document, context: Context) -> Iterator[Problem]:
    """num_processes of accelerate is the total over all nodes; nproc_per_node of torchrun is per node. With fewer than
    GPUs some are idle without a word, with more two processes want the same GPU."""
    job = job_of(script)
    if not job or not job.is_job:
        return
    for launch in launches(job, "accelerate", "torchrun"):
        nodes, gpus = job.nodes_of(launch), job.gpus_of(launch)
        if nodes is None and not launch.step and not job.calls_elsewhere and "nodes" not in job.options:
            nodes = 1
        if not nodes or not gpus or {"cpu", "use_cpu"} & set(launch.options) or (nodes > 1 and not launch.step):
            continue
        if launch.step and (launch.step.tasks or 2) > 1:
            continue
        found = _total(launch, context, nodes, gpus) if launch.kind == "accelerate" else _per_node(launch, gpus)
        if found and not (found[2] and (job.shares_gpus or launch.options.get("gpu_ids", "all") != "all")):
            yield Problem(launch.line, found[0], found[1], severity="warning" if found[2] else None)


def _total(launch: Launch, context: Context, nodes: int, gpus: int) -> tuple[str, str, bool] | None:
    """Message, fix, and whether GPUs are only idle."""
    given, total = setting(launch, context, "num_processes"), nodes * gpus
    place = f"{counted(nodes, 'node')} with {counted(gpus, 'GPU')} each" if nodes > 1 else counted(gpus, "GPU")
    fix = f"write --num_processes {total}" + (" (the total over all nodes)" if nodes > 1 else "")
    count = given.number
    if count is None:
        if given.missing and nodes > 1:
            return f"num_processes is not given: accelerate takes the {gpus} of one node for the total", fix, False
        return None
    if count == gpus and nodes > 1:
        return f"num_processes is the total over all nodes, but {count} is the number per node: {place}", fix, False
    if count > total:
        return f"num_processes is {count} for {place}", fix, False
    if count % nodes:
        return f"num_processes is {count}, which {nodes} nodes cannot share evenly", fix, False
    if count < total:
        return f"num_processes is {count} for {place}: {total - count} of {total} GPUs stay idle", fix, True
    return None


def _per_node(launch: Launch, gpus: int) -> tuple[str, str, bool] | None:
    given = launch.options.get("nproc_per_node")
    fix = f"write --nproc-per-node={gpus}"
    if given is None and launch.complete and gpus > 1:
        return f"nproc_per_node is not given: one process for {gpus} GPUs", fix, True
    count = number(given)
    if count is not None and count > gpus:
        return f"nproc_per_node is {count}, but a node has {counted(gpus, 'GPU')}: it counts per node", fix, False
    if count is not None and count < gpus:
        return f"nproc_per_node is {count} for {gpus} GPUs: {gpus - count} stay idle", fix, True
    return None


@rule(
    "sbatch-machine-rank",
    "error",
    "sbatch",
    bad=GOOD_TWO.replace('--machine_rank "$SLURM_NODEID" ', "--machine_rank 0 "),
    good=GOOD_TWO,
    link="huggingface/accelerate#2816",
)
def machine_rank(script: Document, context: Context) -> Iterator[Problem]:
    """Every node needs a rank of its own, and only the step knows it. accelerate 1.15 ends with a TypeError where
    none is given; the same one for all makes them wait for each other."""
    job = job_of(script)
    for launch in on_several_nodes(job, "accelerate", "torchrun") if job else ():
        name = "machine_rank" if launch.kind == "accelerate" else "node_rank"
        nodes = launch.step.nodes if launch.step else 0
        fix = f"write --{name}=$SLURM_NODEID inside of srun bash -c '...' (single quotes)"
        given = setting(launch, context, name)
        backend = setting(launch, context, "rdzv_backend")
        dynamic = not backend.sure or (backend.value or "static") != "static"
        if (launch.kind == "torchrun" or config_of(launch, context)) and dynamic:
            continue
        machines = setting(launch, context, "num_machines", "nnodes")
        if "standalone" in launch.options or machines.missing or machines.number not in (None, nodes):
            continue
        if given.number is not None and (launch.step and launch.step.tasks == 1):
            yield Problem(launch.line, f"{name} is {given.number} on all {nodes} nodes", fix)
        elif given.missing:
            yield Problem(launch.line, f"{name} is not given on {nodes} nodes", fix)


@rule(
    "sbatch-c10d-rank",
    "warning",
    "sbatch",
    bad=GOOD_TWO.replace("--num_machines", "--rdzv_backend c10d --num_machines"),
    good=GOOD_TWO,
    link="NVIDIA-NeMo/Megatron-Bridge#1129",
)
def c10d_rank(script: Document, context: Context) -> Iterator[Problem]:
    """The c10d rendezvous deals out ranks itself and ignores the one that is given: rank 0, its logs and checkpoints,
    may be on any node, and a second, random port has to be open."""
    job = job_of(script)
    for launch in on_several_nodes(job, "accelerate", "torchrun") if job else ():
        rank = launch.options.get("machine_rank", launch.options.get("node_rank"))
        if setting(launch, context, "rdzv_backend").value == "c10d" and rank is not None:
            message = "rdzv_backend is c10d, which ignores the machine rank: rank 0 may be on any node"
            yield Problem(launch.line, message, "use --rdzv_backend static, or drop the rank under torchrun")


HERE = re.compile(r"(localhost|127(\.\d+){3}|0\.0\.0\.0|::1|\[::1\])(:\d+)?")
OWN_NAME = re.compile(r"\$\(\s*(/bin/)?hostname\b[^)]*\)|`hostname\b[^`]*`|\$\{?(HOSTNAME|SLURMD_NODENAME)\}?")


@rule(
    "sbatch-head-address",
    "error",
    "sbatch",
    bad=GOOD_TWO.replace('"$HEAD"', "localhost"),
    good=GOOD_TWO,
    link="huggingface/accelerate#1489",
)
def head_address(script: Document, context: Context) -> Iterator[Problem]:
    """All nodes have to meet at the first one. With localhost, or each node's own name, every node waits for itself
    until the time limit."""
    job = job_of(script)
    if not job:
        return
    names = ("main_process_ip", "master_addr", "rdzv_endpoint")
    fix = 'take the first node: HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1), exported'
    for launch in on_several_nodes(job):
        name = next((each for each in names if each in launch.options), names[0])
        given = setting(launch, context, name)
        value = given.value or ""
        nodes = launch.step.nodes if launch.step else 0
        if HERE.fullmatch(value):
            yield Problem(launch.line, f"{name} is {value} on {nodes} nodes: each waits for itself", fix)
        elif launch.step and launch.step.shell and OWN_NAME.search(shown(value)) and "scontrol" not in value:
            if not job.scope.exported & set(re.findall(r"\w+", launch.step.shell)) or OWN_NAME.search(
                launch.step.shell
            ):
                yield Problem(launch.line, f"{name} is {shown(value)}, another on each of {nodes} nodes", fix)
        elif launch.kind == "accelerate" and given.missing and not setting(launch, context, "num_machines").missing:
            yield Problem(
                launch.line, f"main_process_ip is not given on {nodes} nodes: accelerate looks for a host None", fix
            )
    if any(on_several_nodes(job)):
        for each in job.scope.all:
            if each.name == "MASTER_ADDR" and each.word and HERE.fullmatch(each.word.text) and not each.nested:
                yield Problem(each.line, f"MASTER_ADDR is {each.word.text} on {job.nodes} nodes", fix)


@rule(
    "sbatch-fixed-port",
    "warning",
    "sbatch",
    bad=GOOD.replace("accelerate launch --multi_gpu --mixed_precision fp16 --num_machines 1 --num_processes 4",
                     "torchrun --nproc-per-node 4").replace('--main_process_port "$port"', "--master-port 29500"),
    good=GOOD,
    link="pytorch/pytorch#116974",
)  # fmt: skip
def fixed_port(script: Document, context: Context) -> Iterator[Problem]:
    """Two jobs on one node with the same port: the second ends with EADDRINUSE, or joins the first."""
    job = job_of(script)
    if not job or job.is_exclusive or not job.gpus or job.gpus >= 8 or not job.trains:
        return
    fix = "derive it from the job: $((20000 + SLURM_JOB_ID % 12000))"
    for launch in launches(job, "accelerate", "torchrun", "deepspeed"):
        for name in ("main_process_port", "master_port", "rdzv_endpoint"):
            port = number((setting(launch, context, name).value or "").rpartition(":")[2])
            if port and not HERE.fullmatch(launch.options.get("rdzv_endpoint", "")):
                alone = launch.kind == "accelerate" and job.nodes_of(launch) == 1  # takes a free port, with a warning
                message = f"port {port} is fixed, so two jobs on one node collide"
                yield Problem(launch.line, message, fix, severity="info" if alone else None)
                return
    for each in job.scope.all:
        if each.name == "MASTER_PORT" and each.word and number(each.word.text) and not each.nested:
            yield Problem(each.line, f"MASTER_PORT is always {each.word.text}, so two jobs on one node collide", fix)
            return


@rule(
    "sbatch-array-port",
    "info",
    "sbatch",
    bad=GOOD.replace("--nodes=1", "--nodes=1 --array=0-3").replace("%j", "%A-%a").replace(
        "20000 + SLURM_JOB_ID % 12000", "29500 + SLURM_ARRAY_TASK_ID"),
    good=GOOD.replace("--nodes=1", "--nodes=1 --array=0-3").replace("%j", "%A-%a"),
)  # fmt: skip
def array_port(script: Document, context: Context) -> Iterator[Problem]:
    """Task ids repeat from array to array: two of them on one node get the same port. Job ids do not repeat."""
    job = job_of(script)
    for launch in launches(job, "accelerate", "torchrun") if job and not job.is_exclusive else ():
        value = launch.options.get("main_process_port", launch.options.get("master_port", ""))
        if "SLURM_ARRAY_TASK_ID" in value and not re.search("JOB_?ID", value):
            message = f"the port comes from the array's task id only ({shown(value)})"
            yield Problem(launch.line, message, "use $((20000 + SLURM_JOB_ID % 12000)): it differs per element too")


# --- GPUs


@rule(
    "sbatch-cuda-visible-devices",
    "error",
    "sbatch",
    bad=GOOD.replace("set -e", "export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\nset -e"),
    good=GOOD,
    link="mlfoundations/open_clip#614",
)
def cuda_visible_devices(script: Document, context: Context) -> Iterator[Problem]:
    """Slurm sets CUDA_VISIBLE_DEVICES to the cards it gave. Set by hand it may point at cards of other jobs."""
    job = job_of(script)
    if not job or not job.gpus or job.is_exclusive:
        return
    for each in job.scope.all:
        if each.name != "CUDA_VISIBLE_DEVICES" or each.word is None or each.nested:
            continue
        value = job.scope.expand(each.word).strip()
        ids = [int(part) for part in value.split(",")] if re.fullmatch(r"\d{1,3}(,\d{1,3})*", value) else None
        fix = "delete it, Slurm sets CUDA_VISIBLE_DEVICES itself"
        asked = f"{counted(job.gpus, 'GPU')} asked for"
        if value in ("", "-1", "NoDevFiles") and not each.prefix and each.exported and job.trains:
            yield Problem(each.line, f"CUDA_VISIBLE_DEVICES={value!r} hides all GPUs, {asked}", fix)
        elif ids is None:
            continue
        elif len(ids) > job.gpus or max(ids) >= job.gpus:
            yield Problem(each.line, f"CUDA_VISIBLE_DEVICES={value} set by hand, but {asked}: other jobs' cards", fix)
        elif not each.prefix and each.exported and job.gpus < 8:
            message = f"CUDA_VISIBLE_DEVICES={value} set by hand: without cgroups these may be the cards of other jobs"
            yield Problem(each.line, message, fix, severity="warning")


@rule(
    "sbatch-gpu-ids",
    "error",
    "sbatch",
    bad=GOOD.replace("--multi_gpu", "--multi_gpu --gpu_ids 4,5,6,7"),
    good=GOOD,
)
def gpu_ids(script: Document, context: Context) -> Iterator[Problem]:
    """accelerate replaces Slurm's CUDA_VISIBLE_DEVICES by gpu_ids: ids beyond the GPUs of the job are cards of other
    jobs, or none at all."""
    job = job_of(script)
    for launch in launches(job, "accelerate") if job and not job.is_exclusive else ():
        gpus = job.gpus_of(launch) if job else None
        value = setting(launch, context, "gpu_ids").value or ""
        if gpus and re.fullmatch(r"\d{1,3}(\s*,\s*\d{1,3})*", value):
            ids = [int(part) for part in value.split(",")]
            if len(ids) > gpus or max(ids) >= gpus:
                message = f"gpu_ids is {value}, but a node of the job has {counted(gpus, 'GPU')}, from 0 on"
                yield Problem(launch.line, message, "write --gpu_ids all: Slurm chooses the cards")


@rule(
    "sbatch-gpus-per-task",
    "warning",
    "sbatch",
    bad=GOOD.replace("--ntasks-per-node=1", "--ntasks-per-node=4").replace("--gpus-per-node=4", "--gpus-per-task=1")
    .split("port=")[0] + "srun python train.py\n",
    good=GOOD.replace("--ntasks-per-node=1", "--ntasks-per-node=4").split("port=")[0] + "srun python train.py\n",
    link="ACEsuit/mace#435",
)  # fmt: skip
def gpus_per_task(script: Document, context: Context) -> Iterator[Problem]:
    """With --gpus-per-task each task sees its own card only, as number 0. A program that takes the card of its local
    rank finds none from rank 1 on, and NCCL cannot use the direct links between them."""
    job = job_of(script)
    for step in job.steps if job else ():
        own = "gpus-per-task" in step.own
        options = step.own if own else job.options if job else step.own
        each = gpu_count(options.text("gpus-per-task"))
        bind = (step.own.text("gpu-bind") or (job.options.text("gpu-bind") if job else "")) or ""
        if not each or (step.tasks or 1) < 2 or "none" in bind or not step.launches:
            continue
        total = each * (step.tasks or 1)
        message = (
            f"--gpus-per-task={each} with {step.tasks} tasks per node: each sees {counted(each, 'card')}, called 0"
        )
        line = step.line if own else options.line("gpus-per-task")
        yield Problem(line, message, f"write --gpus-per-node={total}, or add --gpu-bind=none")


WITH_BF16 = re.compile(
    r"(?i)\b(a100|h100|h200|h800|a800|gh200|b200|a40|a30|a10g?|a6000|a5000|l40s?|l4|rtx|ampere|hopper|ada)"
)


@rule(
    "sbatch-bf16",
    "error",
    "sbatch",
    bad=GOOD.replace("fp16", "bf16"),
    good=GOOD,
    link="huggingface/accelerate#1693",
)
def bf16(script: Document, context: Context) -> Iterator[Problem]:
    """GPUs before Ampere have no bf16 units. Libraries emulate it without a word, slower than fp32."""
    job = job_of(script)
    if not job or context.gpu.has_bf16:
        return
    asked = " ".join(filter(None, (job.options.text(name) for name in ("gres", "gpus-per-node", "gpus", "constraint",
                                                                       "partition", "gpus-per-task"))))  # fmt: skip
    if WITH_BF16.search(asked.replace("_", " ")):
        return
    for launch in launches(job):
        words = [f"--mixed_precision={launch.options.get('mixed_precision', '')}", *launch.arguments]
        found = next((word for word in _pairs(words) if BF16.fullmatch(word)), None)
        if found:
            message = f"{found} on {context.gpu.name}, which has no bf16 units"
            yield Problem(launch.line, message, "use fp16: --mixed_precision fp16, or --fp16 of the training arguments")


BF16 = re.compile(
    r"--(mixed[_-]precision|precision|dtype|torch_dtype)[= ](bf16|bfloat16|bf16-mixed)|--bf16([= ](true|1))?", re.I
)


def _pairs(words: list[str]) -> Iterator[str]:
    """Options with their values, in the forms --name=value and "--name value"."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else "--"
        yield word if following.startswith("-") or "=" in word else f"{word} {following}"


@rule(
    "sbatch-cpus-below-processes",
    "warning",
    "sbatch",
    bad=GOOD.replace("--cpus-per-task=16", "--cpus-per-task=2"),
    good=GOOD,
)
def cpus_below_processes(script: Document, context: Context) -> Iterator[Problem]:
    """One launcher task starts all processes of a node, and they share its cores, their loader workers too."""
    job = job_of(script)
    if not job or job.is_exclusive:
        return
    for launch in launches(job, "accelerate", "torchrun"):
        nodes, cpus = job.nodes_of(launch) or 0, job.options.number("cpus-per-task")
        step = launch.step
        own = step.own.number("cpus-per-task") if step else None
        if not nodes or not cpus or job.tasks != 1 or (step and step.tasks != 1):
            continue
        total = setting(launch, context, "num_processes").number
        processes = number(launch.options.get("nproc_per_node")) or (total // nodes if total else None)
        if processes and (own or cpus) < processes:
            message = f"--cpus-per-task={own or cpus} for {processes} processes per node"
            line = launch.line if own else job.options.line("cpus-per-task")
            yield Problem(line, message, f"ask for at least {4 * processes}, some for each process and its workers")


# --- several launchers of nodes


@rule(
    "sbatch-deepspeed-launcher",
    "error",
    "sbatch",
    bad=GOOD_TWO.replace("--multi_gpu", "--use_deepspeed --zero_stage 2"),
    good=GOOD_TWO.replace("--multi_gpu", "--use_deepspeed --zero_stage 2 --deepspeed_multinode_launcher standard"),
    link="huggingface/accelerate#1837",
)
def deepspeed_launcher(script: Document, context: Context) -> Iterator[Problem]:
    """With DeepSpeed accelerate starts other nodes over pdsh by default. Under srun, where each node has a launcher
    already, every node then becomes a world of its own and trains its own copy."""
    job = job_of(script)
    for launch in on_several_nodes(job, "accelerate", "deepspeed") if job else ():
        nodes = launch.step.nodes if launch.step else 0
        if launch.kind == "deepspeed":
            if not {"hostfile", "no_ssh", "H"} & set(launch.options) and launch.complete:
                message = f"the deepspeed launcher under srun: each of {nodes} nodes is a world of its own"
                yield Problem(launch.line, message, "start accelerate launch or torchrun with srun instead")
            continue
        config = config_of(launch, context)
        chosen = setting(launch, context, "deepspeed_multinode_launcher")
        value = launch.options.get("deepspeed_multinode_launcher")
        if config is not None and value is None:
            value = config.get("deepspeed_config.deepspeed_multinode_launcher")
            used = config.get("distributed_type") == "DEEPSPEED" and config.get("num_machines") in (None, 1)
        else:
            used = "use_deepspeed" in launch.options and chosen.sure
        if used and value in (None, "pdsh"):
            message = f"deepspeed_multinode_launcher is {value or 'not given, so pdsh'}: {nodes} worlds instead of one"
            yield Problem(launch.line, message, "write --deepspeed_multinode_launcher standard")


# --- variables


PRESET = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "TMPDIR", "USER", "SHELL", "PWD", "HOSTNAME", "CPATH",
          "LIBRARY_PATH", "MANPATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "CONDA_PREFIX", "SHELLOPTS",
          "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}  # fmt: skip


@rule(
    "sbatch-not-exported",
    "error",
    "sbatch",
    bad=GOOD_TWO.replace("export PORT", "PORT"),
    good=GOOD_TWO,
)
def not_exported(script: Document, context: Context) -> Iterator[Problem]:
    """In single quotes a variable is filled in by the shell inside of the step, which only knows exported ones: it is
    empty there."""
    job = job_of(script)
    if not job or re.search(r"\bset (-\w*a|-o allexport)|\bexport -n|--export", job.code):
        return
    shell_variables = {each.name: each for each in job.scope.all if each.word is not None and not each.prefix}
    prefixes = {each.name for each in job.scope.all if each.prefix}
    for step in job.steps:
        inner = step.scope
        if inner is None or step.shell is None:
            continue
        used = re.findall(r"\$\{?([A-Za-z_]\w*)(?=\}|\b(?!\s*:?[-+]))", UNKNOWN.sub("", step.shell))
        for name in dict.fromkeys(used):
            each = shell_variables.get(name)
            known = job.scope.exported | prefixes | set(inner.values) | PRESET
            if each and name not in known and not name.startswith("SLURM_"):
                message = f"${name} stands in single quotes, but line {each.line} does not export it: it is empty there"
                yield Problem(step.line, message, f"write export {name}=... at line {each.line}")


ONLY_IF_ASKED = {
    "SLURM_GPUS_PER_NODE": ("gpus-per-node",),
    "SLURM_NTASKS_PER_NODE": ("ntasks-per-node", "tasks-per-node"),
    "SLURM_CPUS_PER_TASK": ("cpus-per-task",),
    "SLURM_GPUS_PER_TASK": ("gpus-per-task",),
    "SLURM_MEM_PER_NODE": ("mem",),
}


@rule(
    "sbatch-unset-variable",
    "warning",
    "sbatch",
    bad=GOOD.replace("--gpus-per-node=4", "--gres=gpu:4").replace(
        "--num_processes 4", "--num_processes $SLURM_GPUS_PER_NODE"
    ),
    good=GOOD.replace("--gpus-per-node=4", "--gres=gpu:4").replace(
        "--num_processes 4", "--num_processes $SLURM_GPUS_ON_NODE"
    ),
)
def unset_variable(script: Document, context: Context) -> Iterator[Problem]:
    """Some variables of Slurm exist only where the option of the same name was given; else they are empty."""
    job = job_of(script)
    if not job or not job.is_job or not job.is_shell:
        return
    given = [job.options, *(step.own for step in job.steps)]
    assigned = {each.name for each in job.scope.all}
    for name, options in ONLY_IF_ASKED.items():
        looked_at = re.search(rf"(-[nz]|-v) \$?\{{?{name}\b", job.code)
        if name in assigned or looked_at or any(option in each for option in options for each in given):
            continue
        for command in job.commands:
            text = " ".join(word.text for word in command.words)
            if re.search(rf"\${name}\b|\${{{name}}}|\(\([^)]*\b{name}\b", text):
                instead = ", or use $SLURM_GPUS_ON_NODE" if name == "SLURM_GPUS_PER_NODE" else ""
                message = f"${name} is empty: it is set only where --{options[0]} is given"
                yield Problem(command.line, message, f"add #SBATCH --{options[0]}=N{instead}")
                break


@rule(
    "sbatch-export-none",
    "warning",
    "sbatch",
    bad=GOOD_TWO.replace("#SBATCH --time", "#SBATCH --export=NONE\n#SBATCH --time"),
    good=GOOD_TWO.replace("#SBATCH --time", "#SBATCH --export=NONE\n#SBATCH --time").replace(
        "set -e", "unset SLURM_EXPORT_ENV\nset -e"),
)  # fmt: skip
def export_none(script: Document, context: Context) -> Iterator[Problem]:
    """--export=NONE holds for the steps too: what the script exports does not reach what srun starts."""
    job = job_of(script)
    if not job or (job.options.text("export") or "").upper() != "NONE" or "SLURM_EXPORT_ENV" in job.code:
        return
    exported = sorted(each for each in job.scope.exported if each not in PRESET)
    for step in job.steps:
        if exported and "export" not in step.own and step.launches:
            message = f"--export=NONE: srun does not hand on {', '.join(exported[:3])}"
            yield Problem(step.line, message, "write unset SLURM_EXPORT_ENV, or srun --export=ALL")
            return


# --- ends: signals, requeues, exit status


@rule(
    "sbatch-requeue-without-signal",
    "warning",
    "sbatch",
    bad=GOOD.replace("#SBATCH --time", "#SBATCH --requeue\n#SBATCH --time"),
    good=GOOD.replace("#SBATCH --time", "#SBATCH --requeue\n#SBATCH --signal=TERM@180\n#SBATCH --time"),
)
def requeue_without_signal(script: Document, context: Context) -> Iterator[Problem]:
    """A requeued job starts from its last checkpoint. Without a signal before the limit nothing tells it to save, and
    all since then is lost."""
    job = job_of(script)
    if job and "requeue" in job.options and "signal" not in job.options and job.gpus:
        if "trap" not in job.code and not re.search(r"signal", job.code):
            message = "--requeue without --signal: nothing tells the training to save before the time limit"
            yield Problem(job.options.line("requeue"), message, "add #SBATCH --signal=TERM@180 and save on the signal")


def signal_of(job: Job) -> re.Match[str] | None:
    return SIGNAL.fullmatch(job.options.text("signal") or "")


def traps(job: Job) -> dict[str, int]:
    """Signals that the batch shell handles, with the line."""
    found: dict[str, int] = {}
    for command in job.commands:
        words = [word.text for word in command.words]
        if words[0] == "trap" and len(words) > 2 and words[1] not in ("", "-"):
            found |= {word.upper().removeprefix("SIG"): command.line for word in words[2:]}
    names = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT", "1": "HUP"}
    return {names.get(name, name): line for name, line in found.items()}


ENVIRONMENT_FILE = re.compile(
    r"activate|bashrc|profile|conda|module|env|setup|venv|lmod|init|intel|spack", re.IGNORECASE
)


def _sources_other(job: Job) -> bool:
    return any(
        command.words[0].text in ("source", ".")
        and not ENVIRONMENT_FILE.search(" ".join(each.text for each in command.words))
        for command in job.commands
    )


@rule(
    "sbatch-signal-without-trap",
    "warning",
    "sbatch",
    bad=GOOD_SIGNAL.replace("trap", "# trap"),
    good=GOOD_SIGNAL,
)
def signal_without_trap(script: Document, context: Context) -> Iterator[Problem]:
    """--signal=B: goes to the batch shell alone. Without a trap for it the shell ends at once, and the training with
    it, before the time limit and without a checkpoint."""
    job = job_of(script)
    found = signal_of(job) if job else None
    if not job or not found or "B" not in (found["where"] or "").upper() or not job.is_shell or _sources_other(job):
        return
    ignored = any(command.words[0].text == "exec" or "trap" == command.words[0].text for command in job.commands)
    name = {"10": "USR1", "12": "USR2", "15": "TERM"}.get(found["name"], found["name"].upper())
    if not ignored or (traps(job) and name not in traps(job) and "exec" not in job.code):
        message = f"--signal={found[0]} goes to the batch shell, which has no trap for {name} and ends at once"
        fix = f"add trap 'scancel --signal={name} \"$SLURM_JOB_ID\"' {name}, and wait for srun in the background"
        yield Problem(job.options.line("signal"), message, fix)


@rule(
    "sbatch-trap-in-foreground",
    "warning",
    "sbatch",
    bad=GOOD_SIGNAL.split("&\nstep")[0],
    good=GOOD_SIGNAL,
)
def trap_in_foreground(script: Document, context: Context) -> Iterator[Problem]:
    """A shell runs a trap only after its foreground command has ended: while srun runs in the foreground, the signal
    waits for the end of the training."""
    job = job_of(script)
    found = signal_of(job) if job else None
    if not job or not found or "B" not in (found["where"] or "").upper():
        return
    name = found["name"].upper()
    line = traps(job).get({"10": "USR1", "12": "USR2", "15": "TERM"}.get(name, name))
    training = [launch for launch in job.launches if launch.command or launch.step]
    ends = [(launch.step.command if launch.step else launch.command) for launch in training]
    if line and ends and all(each and not each.is_background and each.end != ")" for each in ends):
        message = f"the trap at line {line} runs only after this command has ended: it is in the foreground"
        fix = "start it with & at the end, then wait for it in a loop"
        yield Problem(training[0].step.line if training[0].step else training[0].line, message, fix)


@rule(
    "sbatch-signal-unreached",
    "warning",
    "sbatch",
    bad=GOOD.replace("#SBATCH --time", "#SBATCH --signal=USR1@180\n#SBATCH --time").replace("srun ", ""),
    good=GOOD.replace("#SBATCH --time", "#SBATCH --signal=USR1@180\n#SBATCH --time"),
)
def signal_unreached(script: Document, context: Context) -> Iterator[Problem]:
    """Without B: a signal goes to the steps that srun started, not to the batch shell and what it runs itself."""
    job = job_of(script)
    found = signal_of(job) if job else None
    if not job or not found or "B" in (found["where"] or "").upper():
        return
    line, name = job.options.line("signal"), found["name"].upper()
    if job.launches and not job.steps and not job.calls_elsewhere and job.trains:
        message = f"--signal={found[0]} goes to steps of srun only, and the script has none"
        yield Problem(line, message, "start the training with srun")
    elif name in traps(job) and name != "TERM" and job.launches:
        message = f"--signal={found[0]} goes to the steps only: the trap at line {traps(job)[name]} never runs"
        yield Problem(line, message, f"write --signal=B:{found[0]}")


@rule(
    "sbatch-signal-too-late",
    "warning",
    "sbatch",
    bad=GOOD_SIGNAL.replace("@180", "@10"),
    good=GOOD_SIGNAL,
)
def signal_too_late(script: Document, context: Context) -> Iterator[Problem]:
    """A checkpoint of a T5 with its optimizer takes a while to write; what is not done at the limit is killed. And a
    signal earlier than the whole limit comes at the start."""
    job = job_of(script)
    found = signal_of(job) if job else None
    if not job or not found or not found["seconds"]:
        return
    seconds, limit = int(found["seconds"]), seconds_of(job.options.text("time") or "")
    if seconds < 30:
        message = f"the signal comes {seconds} s before the limit, too late to save a checkpoint"
        yield Problem(job.options.line("signal"), message, f"write --signal={found[0].partition('@')[0]}@180")
    elif limit and seconds >= limit:
        message = f"the signal comes {seconds} s before the end, but the job has {limit} s in all"
        yield Problem(job.options.line("signal"), message, "give the job more time, or the signal less")


def seconds_of(text: str) -> int | None:
    """A time limit as Slurm reads it."""
    if not TIME.fullmatch(text) or not text[0].isdecimal():
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return (hours * 60 + minutes) * 60 + seconds


@rule(
    "sbatch-time-in-minutes",
    "info",
    "sbatch",
    bad=GOOD.replace("--time=12:00:00", "--time=24:00"),
    good=GOOD,
)
def time_in_minutes(script: Document, context: Context) -> Iterator[Problem]:
    """Two numbers are minutes and seconds, one is minutes: 24:00 ends after 24 minutes."""
    job = job_of(script)
    text = (job.options.text("time") or "") if job else ""
    if job and re.fullmatch(r"(12|24|36|48|72|96|120)(:00)?", text) and job.trains:
        hours = text.split(":")[0]
        message = f"--time={text} is {hours} minutes"
        yield Problem(job.options.line("time"), message, f"for hours write --time={hours}:00:00")


@rule(
    "sbatch-pipe-hides-status",
    "warning",
    "sbatch",
    bad=GOOD.replace("set -euo pipefail\n", "").replace("train.py", "train.py | tee train.log"),
    good=GOOD.replace("train.py", "train.py | tee train.log"),
)
def pipe_hides_status(script: Document, context: Context) -> Iterator[Problem]:
    """A pipe has the exit status of its last part. After a crash the job is COMPLETED, and what depends on it runs."""
    job = job_of(script)
    if not job or re.search("pipefail|PIPESTATUS", job.text):
        return
    for launch in job.launches:
        if launch.kind == "python" and not launch.step and not TRAINING.search(launch.program):
            continue
        commands = [launch.command, launch.step.command if launch.step else None]
        if any(command and command.is_piped for command in commands) and job.is_job:
            message = "the exit status of the training is lost in the pipe: after a crash the job counts as completed"
            yield Problem(launch.line, message, "write set -o pipefail above, or srun --output=FILE without a pipe")
            return


@rule(
    "sbatch-no-wait",
    "error",
    "sbatch",
    bad=GOOD_SIGNAL.split("step=")[0],
    good=GOOD_SIGNAL,
)
def no_wait(script: Document, context: Context) -> Iterator[Problem]:
    """When the batch script ends, Slurm kills what still runs in the background."""
    job = job_of(script)
    if not job or not job.is_job or re.search(r"\bwait\b|kill -0|--pid|\bsleep\b|\bfg\b|\bwhile\b|\buntil\b", job.code):
        return
    behind = [(each.step.command if each.step else each.command) for each in job.launches]
    in_background = [each for each in behind if each and each.is_background and not each.in_function]
    if in_background and in_background[-1] is behind[-1] and not _sources_other(job):
        rest = [each for each in job.commands if each.line > in_background[-1].line]
        if not any(find.text in ("bash", "sh", "python", "srun") for each in rest for find in each.words[:1]):
            message = "it is started in the background, and the script ends without waiting: Slurm kills it at once"
            yield Problem(in_background[-1].line, message, "end the script with wait")


@rule(
    "sbatch-kill-on-bad-exit",
    "info",
    "sbatch",
    bad=GOOD_TWO.replace("--kill-on-bad-exit=1 ", ""),
    good=GOOD_TWO,
    link="pytorch/pytorch#76287",
)
def kill_on_bad_exit(script: Document, context: Context) -> Iterator[Problem]:
    """When one node dies the others wait for it, up to the time limit. With --kill-on-bad-exit=1 the step ended 0.2 s
    later; without it was still there after 76 s."""
    job = job_of(script)
    for launch in on_several_nodes(job) if job else ():
        step = launch.step
        if (
            step
            and not {"kill-on-bad-exit", "K"} & set(step.own.by_name)
            and "KILL_BAD_EXIT" not in (job.code if job else "")
        ):
            if any(UNKNOWN.fullmatch(word) for word in step.words[:1]) or any(map(_is_k, step.own.all)):
                continue
            message = "srun without --kill-on-bad-exit=1: when one node dies, the others wait up to the time limit"
            yield Problem(step.line, message, "write srun --kill-on-bad-exit=1")
            return


def _is_k(option: object) -> bool:
    return getattr(option, "name", "").startswith("K")


# --- output


@rule(
    "sbatch-output-overwritten",
    "info",
    "sbatch",
    bad=GOOD.replace("%x-%j.out", "train.log"),
    good=GOOD,
)
def output_overwritten(script: Document, context: Context) -> Iterator[Problem]:
    """A fixed name is overwritten by the next job, and all elements of an array write into one file at once."""
    job = job_of(script)
    value = (job.options.text("output") or "") if job else ""
    if not job or not value or value.startswith("/dev/") or "append" in (job.options.text("open-mode") or ""):
        return
    if "array" in job.options and not re.search(r"%\d*[ajA]", value):
        message = f"--output={value}: all elements of the array write into it"
        yield Problem(job.options.line("output"), message, "write --output=%x-%A_%a.out", severity="warning")
    elif not re.search(r"%\d*[jJAa]", value) and "$" not in value and "{" not in value:
        yield Problem(job.options.line("output"), f"--output={value} is overwritten by the next job", "put %j into it")


@rule(
    "sbatch-output-folder",
    "info",
    "sbatch",
    bad=GOOD.replace("%x-%j.out", "logs/%x-%j.out").replace("set -e", "mkdir -p logs\nset -e"),
    good=GOOD.replace("%x-%j.out", "logs/%x-%j.out"),
)
def output_folder(script: Document, context: Context) -> Iterator[Problem]:
    """Slurm opens the output before the script runs. Where its folder is not there yet, the job fails without a
    word; a mkdir in the script comes too late."""
    job = job_of(script)
    folder = str(PurePosixPath((job.options.text("output") or "") if job else "").parent)
    for command in job.commands if job and folder not in (".", "/", "") else ():
        words = [word.text.rstrip("/") for word in command.words]
        if words[0] == "mkdir" and folder in [word.removeprefix("./") for word in words[1:]]:
            message = (
                f"mkdir {folder} comes after Slurm has opened --output={job.options.text('output') if job else ''}"
            )
            yield Problem(command.line, message, f"create {folder} before sbatch")
            return
