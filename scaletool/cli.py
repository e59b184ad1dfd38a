"""The command line. Imports nothing heavy: every command loads what it needs when it runs."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from scaletool.errors import ConfigError, ScaletoolError
from scaletool.record import closing_line, default_folder, exit_status

if TYPE_CHECKING:
    from scaletool.config import LoadedConfig

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
configs_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
app.add_typer(configs_app, name="configs")
data_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
app.add_typer(data_app, name="data")

RunFile = Annotated[
    Path | None, typer.Argument(metavar="[RUN.yaml]", help="run config; without it the embedded default")
]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="section.key=value", help="override a config key")]
ExecutorName = Annotated[str, typer.Option("--executor", help="where launches run: local")]
Out = Annotated[Path | None, typer.Option("--out", help="folder of the results [runs/<UTC time>-sweep]")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the launch lines and stop")]


def main() -> NoReturn:
    """Run the command line; expected errors are printed and become DESIGN's exit statuses."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        status = app(standalone_mode=False)
    except ScaletoolError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except OSError as error:
        print(f"error: {error}\n  hint: look at the path, its rights and the free space", file=sys.stderr)
        sys.exit(2 if error.filename else 4)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of the command line library
            print(f"error: {error.format_message()}\n  hint: scaletool --help", file=sys.stderr)
            sys.exit(2)
        raise
    sys.exit(status if isinstance(status, int) else 0)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    """Train T5 on V100 nodes and measure how its speed grows with the GPU count."""
    if version:
        from scaletool import __version__

        print(__version__)
        raise typer.Exit
    _help_without_command(context)


@configs_app.callback()
def configs(context: typer.Context) -> None:
    """The shipped profiles."""
    _help_without_command(context)


@data_app.callback()
def data(context: typer.Context) -> None:
    """Look at data, and tokenise it ahead."""
    _help_without_command(context)


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


@app.command()
def sweep(
    run_file: RunFile = None,
    gpus: Annotated[str, typer.Option(help="process counts, such as 1,2,4,8")] = "1,2",
    profiles: Annotated[str, typer.Option(help="profiles to compare")] = "ddp",
    modes: Annotated[str, typer.Option(help="custom, trainer or both")] = "custom,trainer",
    scaling: Annotated[str, typer.Option(help="weak, strong or both")] = "weak",
    rounds: Annotated[int | None, typer.Option(help="passes over all cells")] = None,
    steps: Annotated[int | None, typer.Option(help="measured steps per cell and round")] = None,
    executor: ExecutorName = "local",
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="finish the sweep in --out")] = False,
    dry_run: DryRun = False,
    set_: Settings = None,
) -> None:
    """Measure every cell through the real launcher, in interleaved rounds."""
    from scaletool.sweep import matrix
    from scaletool.sweep.command import probe_machine
    from scaletool.sweep.run import Sweep, dry_run_lines, open_folder

    flags = [f"measure.{name}={value}" for name, value in (("rounds", rounds), ("steps", steps)) if value is not None]
    loaded = _load(run_file, [*(set_ or []), *flags])
    _refuse_executor(executor)
    machine = probe_machine()
    cells = matrix.make_cells(
        matrix.parse_counts(gpus),
        matrix.split_list(profiles, "--profiles"),
        matrix.parse_names(modes, "--modes", matrix.MODES),
        matrix.parse_names(scaling, "--scaling", matrix.SCALINGS),
        loaded.run,
        gpus_present=len(machine.gpu_names),
    )
    _refuse_profiles(cells, loaded, machine)
    plan = Sweep(tuple(cells), loaded.run, out or default_folder("sweep", time.time()), machine)
    if dry_run:
        print("\n".join(map(str, dry_run_lines(plan))))
        return
    with open_folder(plan, resume=resume):
        status = _measure(plan)
    raise typer.Exit(status)


@app.command()
def train(
    run_file: RunFile = None,
    profile: Annotated[str, typer.Option(help="profile to launch")] = "ddp",
    gpus: Annotated[str, typer.Option(help="number of processes")] = "1",
    mode: Annotated[str | None, typer.Option(help="custom or trainer")] = None,
    executor: ExecutorName = "local",
    dry_run: DryRun = False,
    set_: Settings = None,
) -> None:
    """Launch one training run."""
    from scaletool.sweep import matrix
    from scaletool.sweep.command import launch_line, probe_machine
    from scaletool.sweep.executors import LocalExecutor
    from scaletool.sweep.run import LOG_FILE, launch

    loaded = _load(run_file, [*(set_ or []), *([f"train.mode={mode}"] if mode else [])])
    _refuse_executor(executor)
    counts = matrix.parse_counts(gpus)
    if len(counts) != 1:
        raise ConfigError(f"--gpus {gpus}: one run has one count", hint="scaletool sweep compares several")
    machine = probe_machine()
    present = len(machine.gpu_names)
    (cell,) = matrix.make_cells(counts, [profile], [loaded.run.train.mode], ["weak"], loaded.run, gpus_present=present)
    _refuse_profiles([cell], loaded, machine)
    folder = Path(loaded.run.train.output_dir or default_folder("train", time.time()))
    if dry_run:
        print(launch_line(cell, loaded.run, folder.resolve() / "run.json", machine))
        return
    record = launch(cell, loaded.run, folder, machine, LocalExecutor(), measured=False)
    print(f"{closing_line(record)}\nlog: {folder / LOG_FILE}\n{record.get('stamp') or ''}".rstrip())
    raise typer.Exit(exit_status(record))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of a sweep")],
    formats: Annotated[str, typer.Option(help="files to write")] = "html,md,csv,png",
) -> None:
    """Render a sweep again: the table on stdout, the files beside its results."""
    from scaletool.sweep import matrix
    from scaletool.sweep.report import FORMATS, print_table, write_reports

    summary = write_reports(folder, matrix.parse_names(formats, "--formats", FORMATS))
    print_table(summary, str(folder))


@configs_app.command("list")
def configs_list() -> None:
    """Name the profiles and the engine each stands for."""
    from scaletool.profiles import find_profile, profile_names

    for name in profile_names():
        profile = find_profile(name)
        print(f"{name:20} {profile.engine:15} {profile.content['num_processes']} processes  {profile.path}")


@configs_app.command("show")
def configs_show(name: str) -> None:
    """Print a profile's files."""
    from scaletool.profiles import find_profile

    profile = find_profile(name)
    for path in filter(None, (profile.path, profile.deepspeed_path)):
        print(f"# {path}\n{path.read_text(encoding='utf-8').rstrip()}\n")


@configs_app.command("copy")
def configs_copy(names: list[str], to: Annotated[Path, typer.Option("--to", help="folder to copy into")]) -> None:
    """Copy profiles, and the DeepSpeed files they name, to adapt them. Files that differ are never overwritten."""
    from scaletool.profiles import find_profile

    files: dict[Path, Path] = {}
    for profile in map(find_profile, names):
        files[to / profile.path.name] = profile.path
        if profile.deepspeed_path:
            named = profile.content["deepspeed_config"]["deepspeed_config_file"]
            files[to / named] = profile.deepspeed_path
    for target, origin in files.items():
        if target.exists() and target.read_bytes() != origin.read_bytes():
            raise ConfigError(f"{target} exists and differs", where="--to", hint="remove it, or copy elsewhere")
    for target, origin in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(origin.read_bytes())
        print(target)


@app.command()
def doctor(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE...]", help="configs, training arguments, scripts, job scripts; none: this machine"
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help="the GPU the run is meant for")] = "v100-32gb",
    explain: Annotated[bool, typer.Option("--explain", help="show every setting, and what wins")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="write corrected copies, after showing the changes")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="facts.name=value", help="a fact that no file holds")
    ] = None,
) -> None:
    """Find the mistake before the GPUs do: in any file of a run, in several together, or in this machine."""
    from scaletool.doctor import command
    from scaletool.doctor.documents import Document
    from scaletool.doctor.explain import explain as settings_of
    from scaletool.doctor.fix import corrections, write
    from scaletool.sweep.command import environment

    context = command.context_of(gpu, set_ or [])
    documents: list[Document]
    if files:
        documents, findings = command.examine(files, context)
    else:
        from scaletool.doctor.environment import probe

        documents = [probe(environment())]
        findings = command.findings_of(documents, context)
    settings = settings_of(documents, environment()) if explain else None
    if json:
        print(command.as_json(findings, settings))
    else:
        print(command.as_text(findings, documents))
        if settings:
            print(f"\n{command.explain_text(settings)}")
    if fix:
        copies = corrections(documents, findings)
        for copy in copies:
            print(copy.diff(), end="", file=sys.stderr)
        write(copies)
        for copy in copies:
            print(f"written: {copy.target}", file=sys.stderr)
        if not copies:
            print("nothing that can be corrected mechanically", file=sys.stderr)
    raise typer.Exit(2 if command.counts(findings)["error"] else 0)


@data_app.command("inspect")
def data_inspect(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="data files, or a run config that names them")],
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    set_: Settings = None,
) -> None:
    """Count rows, lengths, cuts, duplicates, overlap and padding; tell what training would refuse."""
    _data_command("inspect", [*files, *(["--json"] if json else [])], set_)


@data_app.command("prepare")
def data_prepare(run_file: RunFile = None, set_: Settings = None) -> None:
    """Tokenise the data of a run ahead, on all cores. What is interrupted goes on where it was."""
    _data_command("prepare", [str(run_file)] if run_file else [], set_)


def _data_command(command: str, arguments: list[str], settings: list[str] | None) -> NoReturn:
    import subprocess

    overrides = [word for setting in settings or [] for word in ("--set", setting)]
    done = subprocess.run([sys.executable, "-m", "scaletool.train.data", command, *arguments, *overrides], check=False)
    raise typer.Exit(done.returncode)


def _measure(plan: Any) -> int:
    """Run a planned sweep with progress on stderr; returns the exit status."""
    from scaletool.sweep.executors import LocalExecutor
    from scaletool.sweep.progress import Progress
    from scaletool.sweep.report import FORMATS, print_table, write_reports
    from scaletool.sweep.run import run_sweep

    statuses: list[int] = []

    def after_cell(cell: Any, number: int, record: dict[str, Any]) -> None:
        statuses.append(exit_status(record))
        progress.done(cell, number, record)
        write_reports(plan.out)

    try:
        with Progress(len(plan.cells) * plan.rounds) as progress:
            run_sweep(plan, LocalExecutor(), before_cell=progress.begin, after_cell=after_cell)
    except (KeyboardInterrupt, SystemExit):
        write_reports(plan.out)
        print(f"interrupted; results so far are in {plan.out}, --resume finishes them", file=sys.stderr)
        raise
    print_table(write_reports(plan.out, FORMATS), str(plan.out))
    failed = {status for status in statuses if status}
    return 0 if not failed else failed.pop() if len(failed) == 1 else 3


def _load(run_file: Path | None, overrides: Sequence[str]) -> LoadedConfig:
    from scaletool.config import load_config
    from scaletool.doctor.run_config import refuse_errors

    loaded = load_config(run_file, overrides)
    refuse_errors(loaded)
    return loaded


def _refuse_profiles(cells: Sequence[Any], loaded: LoadedConfig, machine: Any) -> None:
    """Nothing is launched with files in which the doctor finds an error."""
    from scaletool.doctor.command import refuse_launch

    for profile, gpus in {(cell.profile, cell.gpus) for cell in cells}:
        files = [str(path) for path in (profile.path, profile.deepspeed_path) if path]
        replaced = {"num_processes": gpus, "num_machines": 1, "machine_rank": 0}
        if profile.deepspeed_path is None:
            replaced["mixed_precision"] = {"fp32": "no"}.get(loaded.run.train.precision, loaded.run.train.precision)
        refuse_launch(files, machine.gpu_names[0] if machine.gpu_names else None, **replaced)


def _refuse_executor(name: str) -> None:
    if name != "local":
        raise ConfigError(f"--executor {name} is not available", hint="use --executor local")
