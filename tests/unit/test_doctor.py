"""`scaletool doctor` as a user meets it: files of any kind, several together, damaged, --json, --explain, --fix."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scaletool.doctor.catalogue import catalogue
from scaletool.doctor.command import as_json, context_of, examine
from scaletool.doctor.documents import MOST_BYTES, parse, read
from scaletool.doctor.explain import explain
from scaletool.doctor.fix import corrected, corrections, write
from scaletool.doctor.registry import RULES, Context, Edit, Finding
from scaletool.doctor.schemas import KEPT, read_installed
from scaletool.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def found(*paths: Path | str, settings: list[str] | None = None) -> list[Finding]:
    return examine([str(path) for path in paths], context_of("v100-32gb", settings or []))[1]


def test_there_are_many_rules_of_every_kind() -> None:
    assert len(RULES) >= 70
    assert {kind for rule in RULES.values() for kind in rule.kinds} == {
        "accelerate", "deepspeed", "arguments", "model", "run", "script", "sbatch", "environment",
    }  # fmt: skip


def test_the_page_of_rules_is_generated() -> None:
    page = ROOT / "docs" / "rules.md"
    assert page.read_text(encoding="utf-8") == catalogue(), "run python -m scaletool.doctor.catalogue"


def test_kept_keys_are_those_of_the_installed_libraries() -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert kept == read_installed(), "run python -m scaletool.doctor.schemas"


SHIPPED = ("accelerate_configs/*.yaml", "ds_configs/*.json", "launch/*.sbatch")


@pytest.mark.parametrize("pattern", SHIPPED)
def test_shipped_files_give_no_finding(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for path in sorted(ROOT.glob(pattern)):
        assert found(path.relative_to(ROOT)) == []


# --- files


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a", "num_processes: 4\ndistributed_type: MULTI_GPU\n", "accelerate"),
        ("a.yaml", "train:\n  precision: fp16\n", "run"),
        ("a", '{"zero_optimization": {"stage": 2}}', "deepspeed"),
        ("a", '{"learning_rate": 0.1, "fp16": true}', "arguments"),
        ("a", '{"d_model": 8, "d_kv": 8, "vocab_size": 64}', "model"),
        ("a.txt", "import torch\nmodel = torch.nn.Linear(1, 1)\n", "script"),
        ("a.py", "x = 1\n", "script"),
        ("a.txt", "#!/bin/bash\n#SBATCH --nodes=1\n", "sbatch"),
        ("a.yaml", "hello: world\n", "unknown"),
    ],
)
def test_files_are_recognised_by_content(name: str, text: str, kind: str) -> None:
    assert parse(name, text).kind == kind


def test_lines_of_keys() -> None:
    text = '{\n  "fp16": {\n    "enabled": true\n  },\n  "a": [{"enabled": 1}],\n  "train_batch_size": 8\n}'
    document = parse("a.json", text)
    assert [document.line(key) for key in ("fp16", "fp16.enabled", "a.enabled", "train_batch_size", "none")] == [
        2, 3, 5, 6, None,
    ]  # fmt: skip
    document = parse("a.yaml", "fsdp_config:\n  fsdp_version: 2\n# c\nnum_processes: 4\n")
    assert [document.line(key) for key in ("fsdp_config.fsdp_version", "num_processes")] == [2, 4]


def bomb() -> str:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(levels)


DAMAGED = {
    "random bytes": random.Random(1).randbytes(5000),
    "null bytes": b"num_processes: 4\0\0",
    "nothing": b"",
    "spaces": b"  \n \n",
    "deep json": b'{"a":' * 50_000,
    "deep json, whole": b'{"a":' * 3000 + b"1" + b"}" * 3000,
    "deep list": b"[" * 50_000 + b"]" * 50_000,
    "deep yaml": b"".join(b" " * depth + b"a:\n" for depth in range(900)),
    "deep yaml flow": b"a: " + b"[" * 20_000 + b"]" * 20_000,
    "yaml bomb": bomb().encode(),
    "recursive yaml": b"num_processes: 4\na: &a [*a]\n",
    "python object": b"num_processes: !!python/object/apply:os.system ['touch executed']\n",
    "deep python": b"import os\nx = " + b"(" * 5000 + b")" * 5000,
    "deep python operators": b"import os\nx = " + b"-" * 20_000 + b"1",
    "long python sum": b"import os\nx = " + b"1 + " * 20_000 + b"1",
    "huge": b"num_processes: 4\n" * (MOST_BYTES // 16),
    "many keys": b"num_processes: 4\n" + b"".join(b"k%d: 1\n" % n for n in range(40_000)),
    "long line": b"num_processes: " + b"9" * 500_000,
    "huge number": b'{"num_train_epochs": 1e999, "max_steps": 99999999999999999999999999, "fp16": true}',
    "odd types": b'{"zero_optimization": [], "fp16": 3, "bf16": "x", "train_batch_size": {"a": 1}, "optimizer": []}',
    "odd accelerate": b"num_processes: [1]\ngpu_ids: {a: 1}\nfsdp_config: 7\ndeepspeed_config: [x]\n"
    b"mixed_precision: [fp16]\ndistributed_type: 3\nnum_machines: no\n",
    "odd run": b"train: 3\nmodel: [1]\n",
    "odd keys": b"1: 2\n? [a, b]\n: 3\nnum_processes: 4\n",
    "latin-1": "num_processes: 4 # caf\xe9\n".encode("latin-1"),
    "utf-16": "num_processes: 4\n".encode("utf-16"),
    "two documents": b"num_processes: 4\n---\nnum_processes: 5\n",
    "merge keys": b"a: &a {x: 1}\nnum_processes: 4\nfsdp_config:\n  <<: *a\n",
    "odd script": b"import accelerate\naccelerator.prepare(*[])\nfor x in y: pass\nTrainer(**{})\nTrainer(*a)\n",
    "odd job": b'#!/bin/bash\n#SBATCH\n#SBATCH --=\n#SBATCH -\nsrun\nsrun bash -c "\naccelerate launch --a\n',
    "half an argument": b'#!/bin/sh\naccelerate launch --num_processes "$((',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_end_in_a_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for suffix in ("", ".py", ".json", ".yaml", ".sh"):
        path = tmp_path / f"file{suffix}"
        path.write_bytes(DAMAGED[name])
        findings = found(path)
        assert all(each.message and len(each.message) < 2000 for each in findings)
        json.loads(as_json(findings))
        corrections([read(str(path))], findings)
    assert not (tmp_path / "executed").exists()


def test_odd_paths_end_in_a_message(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, tmp_path, tmp_path / "absent", "a\0b", "/dev/null", "/dev/zero"):
        (finding,) = found(path)
        assert finding.rule == "file-unreadable"


def test_mutated_examples_never_break_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(2)
    texts = [rule.bad for rule in RULES.values() if isinstance(rule.bad, str)]
    for text in texts * 4:
        characters = list(text)
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(characters))
            characters[at] = draw.choice(["", "\n", "{", "]", '"', ":", "- ", "[1]", "null", "x", "0", "(", "é"])
        Path("mutated").write_text("".join(characters), encoding="utf-8")
        found("mutated")


def test_a_call_is_quick_and_imports_no_torch(tmp_path: Path) -> None:
    bomb_path = tmp_path / "bomb.yaml"
    bomb_path.write_text(bomb(), encoding="utf-8")
    script = (
        "import sys; sys.argv = ['scaletool', 'doctor', *sys.argv[1:]]\n"
        "from scaletool.cli import main\n"
        "try: main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'accelerate', 'deepspeed', 'datasets'} & set(sys.modules)\n"
        "    print(heavy, file=sys.stderr)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, str(bomb_path)], capture_output=True, text=True, check=False, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert "set()" in done.stderr
    assert "Traceback" not in done.stderr
    assert after.ru_utime - before.ru_utime < 20  # a bomb that went off would take minutes


# --- several files, facts, output


SEED_LIKE = {
    "accelerate.yaml": "distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 4\nnum_machines: 1\n",
    "dict.json": json.dumps(
        {
            "num_epochs": 3,
            "batches_per_epoch": 4000,
            "hf_training_arguments": {"per_device_train_batch_size": 8, "max_steps": 12000, "eval_steps": 4000},
        }
    ),
}


def written(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def test_steps_times_world_needs_the_fact(tmp_path: Path) -> None:
    paths = written(tmp_path, SEED_LIKE)
    (unknown,) = (each for each in found(*paths) if each.rule == "arguments-steps-times-world")
    assert unknown.severity == "info"
    assert "facts.batches_per_process" in unknown.fix
    findings = found(*paths, settings=["facts.batches_per_process=1000"])
    known, rest = (each for each in findings if each.rule == "arguments-steps-times-world")
    assert "cannot be known" in rest.message
    assert known.severity == "error"
    assert known.key == "hf_training_arguments.max_steps"
    assert "3,000" in known.message
    assert "4 x" in known.message
    assert "3000" in known.fix
    right = found(*paths, settings=["facts.batches_per_process=4000"])
    assert not [each for each in right if each.rule == "arguments-steps-times-world"]


@pytest.mark.parametrize(
    "setting", ["facts.rows", "rows=3", "facts.rows=-1", "facts.rows=x", "facts.no=3", "train.mode=a"]
)
def test_what_is_no_fact_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError):
        context_of("v100-32gb", [setting])
    with pytest.raises(ConfigError):
        context_of("v100", [])


def test_target_decides(tmp_path: Path) -> None:
    (path,) = written(tmp_path, {"a.json": '{"bf16": true, "learning_rate": 0.1, "output_dir": "a"}'})
    assert [each.rule for each in found(path)] == ["arguments-bf16"]
    assert examine([str(path)], context_of("a100-80gb", []))[1] == []


def test_json_form(tmp_path: Path) -> None:
    (path,) = written(tmp_path, {"run.yaml": "train:\n  max_steps: 0\n  precision: bf16\n"})
    content = json.loads(as_json(found(path)))
    assert content["summary"] == {"error": 2, "warning": 0, "info": 0}
    assert all(
        set(each) == {"rule", "severity", "file", "key", "line", "message", "fix", "link"}
        for each in content["findings"]
    )
    assert [(each["key"], each["line"]) for each in content["findings"]] == [
        ("train.max_steps", 2),
        ("train.precision", 3),
    ]


def test_run_configs_that_do_not_load(tmp_path: Path) -> None:
    (path,) = written(tmp_path, {"run.yaml": "train:\n  mode: custom\n  max_step: 3\n"})
    (finding,) = found(path)
    assert (finding.rule, finding.line) == ("run-config", 3)
    assert "max_steps" in finding.fix


# --- --fix


def test_fix_keeps_comments_and_order(tmp_path: Path) -> None:
    text = (
        "# mine\n"
        "distributed_type: MULTI_GPU  # four cards\n"
        "gpu_ids: [0, 1, 2, 3]  # all\n"
        "mixed_precision: fp16\n"
        "num_machines: 1\n"
        "# how many\n"
        "num_processes: 4\n"
    )
    (path,) = written(tmp_path, {"a.yaml": text})
    documents, findings = examine([str(path)], Context())
    (copy,) = corrections(documents, findings)
    expected = text.replace("[0, 1, 2, 3]", '"0,1,2,3"')
    assert [line.split() for line in copy.text.splitlines()] == [line.split() for line in expected.splitlines()]
    assert '+gpu_ids: "0,1,2,3"' in copy.diff()
    write([copy])
    assert path.read_text(encoding="utf-8") == text
    assert found(tmp_path / "a.fixed.yaml") == []
    write([copy])  # the same again is no harm
    (tmp_path / "a.fixed.yaml").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError):
        write([copy])


def test_edits() -> None:
    edits = [
        Edit("rename", "b.old", "new"), Edit("delete", "c"), Edit("set", "d.e", "no"), Edit("delete", "x.y"),
        Edit("set", "a", False),
    ]  # fmt: skip
    text = "a: 1 # one\nb:\n  first: 1\n  old: 2\n  last: 3\nc: 4\n"
    assert corrected(text, edits) == 'a: false # one\nb:\n  first: 1\n  new: 2\n  last: 3\nd:\n  e: "no"\n'
    text = '{\n    "a": 1,\n    "b": {"first": 1, "old": 2, "last": 3},\n    "c": 4\n}\n'
    assert json.loads(corrected(text, edits)) == {
        "a": False, "b": {"first": 1, "new": 2, "last": 3}, "d": {"e": "no"},
    }  # fmt: skip
    assert list(json.loads(corrected(text, edits))["b"]) == ["first", "new", "last"]
    assert '\n    "a": false' in corrected(text, edits)


# --- --explain


def test_explain_names_winners_and_losers(tmp_path: Path) -> None:
    paths = written(
        tmp_path,
        {
            "accelerate.yaml": "distributed_type: DEEPSPEED\nnum_processes: 4\nnum_machines: 1\n"
            "deepspeed_config:\n  deepspeed_config_file: ds.json\n",
            "ds.json": '{"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
            "args.json": '{"max_grad_norm": 1.0, "fp16": true, "gradient_accumulation_steps": 2}',
        },
    )
    documents = [read(str(path)) for path in paths if path.name != "ds.json"]
    settings = {setting.name: setting for setting in explain(documents, {})}
    assert settings["world_size"].value == 4
    clipping = settings["max_grad_norm"]
    assert (clipping.value, clipping.place) == (0.5, f"{tmp_path / 'ds.json'}:1")
    assert [(source.value, source.place) for source in clipping.lost] == [(1.0, f"{tmp_path / 'args.json'}:1")]
    assert settings["zero_stage"].value == 2
    assert settings["precision"].value == "fp16"
    assert "default of transformers" in settings["per_device_batch_size"].place


def test_explain_of_our_own_run() -> None:
    document = parse("run.yaml", "train:\n  precision: fp32\n  gradient_accumulation_steps: 2\n")
    profile = parse("ddp.yaml", "distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 2\n")
    environment = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    settings = {setting.name: setting for setting in explain([document, profile], environment)}
    assert settings["precision"].value == "fp16"
    assert [source.value for source in settings["precision"].lost] == ["fp32"]
    assert settings["gradient_accumulation_steps"].value == 4
    assert settings["mode"].place.startswith("default of scaletool")


def test_time_of_many_files(tmp_path: Path) -> None:
    """Fifty files take about as long as the start of the program; measured, not held to a clock here."""
    paths = written(tmp_path, {f"{number}.yaml": SEED_LIKE["accelerate.yaml"] for number in range(50)})
    started = time.process_time()
    assert found(*paths) == []
    print(f"50 files: {time.process_time() - started:.2f} s of CPU")
