"""Every command of the README runs: the quick ones as they stand, the installing ones by what they name."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


def words_of(command: str, scratch: Path) -> list[str]:
    """The command with this environment's programs, short measurements, and its files in a scratch folder."""
    words = [word.replace("runs/sweep", str(scratch / "sweep")) for word in shlex.split(command)]
    words = [word.replace("my_configs", str(scratch / "my_configs")) for word in words]
    program = Path(sys.executable).with_name(words[0])
    if words[:2] == ["scaletool", "sweep"]:
        words += ["--steps", "2"]
        words[words.index("--rounds") + 1] = "1"
    if "train.max_steps=5" in words:
        words += ["--set", f"train.output_dir={scratch / 'train'}"]
    return [str(program), *words[1:]]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("make ")])
def test_command_runs(command: str, scratch: Path) -> None:
    done = subprocess.run(
        words_of(command, scratch), cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_make_target_exists(command: str) -> None:
    done = subprocess.run(
        ["make", "-n", *command.split()[1:]], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_run_config_of_the_readme_is_valid(tmp_path: Path) -> None:
    from scaletool.config import load_config
    from scaletool.doctor.run_config import check_run

    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(block)
    assert [finding.rule for finding in check_run(load_config(path)) if "files" not in finding.rule] == []
