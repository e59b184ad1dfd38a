"""The command line from outside: exit statuses, messages, flags, and no torch anywhere on the driver's side."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

BLOCKED = ("torch", "transformers", "accelerate", "datasets", "deepspeed")
BLOCKER = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise AssertionError("the driver imports " + name)
sys.meta_path.insert(0, Block())
from scaletool.cli import main
main()
"""

FLAGS = {
    "sweep": "--dry-run --executor --gpus --help --modes --out --profiles --resume --rounds --scaling --set --steps",
    "train": "--dry-run --executor --gpus --help --mode --profile --set",
    "report": "--formats --help",
}


def scaletool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKER, *arguments]
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", "--gpus", "0"], "'0' is not a process count"),
        (["sweep", "--gpus", "two"], "'two' is not a process count"),
        (["sweep", "--profiles", "zero9"], "unknown profile zero9"),
        (["sweep", "--modes", "fast"], "unknown 'fast'"),
        (["sweep", "--gpus", "1,3", "--scaling", "strong"], "do not divide"),
        (["sweep", "--executor", "cloud"], "--executor cloud is not available"),
        (["sweep", "missing.yaml"], "missing.yaml does not exist"),
        (["sweep", "--set", "train.learning_rat=1"], "did you mean train.learning_rate?"),
        (["sweep", "--set", "train.learning_rate=-1"], "train.learning_rate"),
        (["sweep", "--steps", "0"], "measure.steps"),
        (["train", "--gpus", "1,2"], "one run has one count"),
        (["train", "--mode", "fast"], "train.mode"),
        (["report", "nowhere"], "holds no sweep"),
        (["configs", "show", "zero9"], "unknown profile"),
        (["sweep", "--out", "/dev/null/x"], "/dev/null"),
        (["sweep", "--out", "/dev/null"], "is a file"),
        (["sweep", "--profiles", "ddp,ddp"], "given twice"),
        (["sweep", "--set", "data.num_workers=100000"], "data.num_workers"),
        (["nonsense"], "nonsense"),
        (["sweep", "--nonsense"], "nonsense"),
    ],
)
def test_user_errors_are_status_2_without_a_traceback(words: list[str], message: str, tmp_path: Path) -> None:
    done = scaletool(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("words", [[], ["configs"]])
def test_without_a_command_the_help_is_shown(words: list[str], tmp_path: Path) -> None:
    done = scaletool(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage:")


def test_help_is_quick(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert scaletool("--help", cwd=tmp_path).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.2


def test_line_of_a_wrong_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train:\n  mode: custom\n  learning_rate: fast\n")
    done = scaletool("train", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "run.yaml:3 (train.learning_rate)" in done.stderr


def test_dry_run_and_version_and_configs(tmp_path: Path) -> None:
    done = scaletool("sweep", "--gpus", "1,2", "--profiles", "ddp,fsdp", "--modes", "custom", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
    assert scaletool("--version", cwd=tmp_path).stdout.startswith("0.")
    assert "fsdp_grad_op" in scaletool("configs", "list", cwd=tmp_path).stdout
    assert '"stage": 2' in scaletool("configs", "show", "zero2", cwd=tmp_path).stdout
    assert list(tmp_path.iterdir()) == []


def test_copied_profile_is_a_working_one(tmp_path: Path) -> None:
    copied = scaletool("configs", "copy", "zero2", "--to", "mine", cwd=tmp_path)
    assert copied.returncode == 0, copied.stderr
    done = scaletool(
        "sweep", "--profiles", "mine/zero2.yaml", "--gpus", "1", "--modes", "custom", "--dry-run", cwd=tmp_path
    )
    assert str(tmp_path / "mine" / "ds_configs" / "zero2.json") in done.stdout
    (tmp_path / "mine" / "zero2.yaml").write_text("changed: true\n")
    assert scaletool("configs", "copy", "zero2", "--to", "mine", cwd=tmp_path).returncode == 2


def test_report_of_a_finished_sweep(tmp_path: Path) -> None:
    from test_sweep import go, plan, worker

    go(plan(tmp_path / "done"), worker())
    done = scaletool("report", "done", "--formats", "md,csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "efficiency" in done.stdout
    assert json.loads((tmp_path / "done" / "summary.json").read_text())["cells"]


def test_flags_are_frozen() -> None:
    from scaletool.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, flags in FLAGS.items():
        found = {flag for parameter in commands[name].params for flag in parameter.opts if flag.startswith("--")}
        assert found | {"--help"} == set(flags.split()), name
        assert len(found) <= 12
