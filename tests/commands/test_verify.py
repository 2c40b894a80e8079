"""``verify``: silent about a good run directory; every damage is a finding and none a traceback."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import launch, succeed
from runs import TENSORBOARD, TINY, train_on

from ddp_trainer.config.loggers import JsonlConfig, TensorBoardConfig
from ddp_trainer.observers.loggers.jsonl import JsonlLogger
from ddp_trainer.observers.loggers.tensorboard import TensorBoardLogger
from ddp_trainer.tools.verify import RunFiles, check_tensorboard, find_damage


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    train_on(2, *TINY, TENSORBOARD, f"output_dir={folder}", "name=run", "log_every_steps=2")
    return folder / "run"


@pytest.fixture
def run_dir(good_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good_run, tmp_path / "run")


def findings_of(run_dir: Path) -> list[str]:
    return [finding for findings in find_damage(run_dir).values() for finding in findings]


def test_a_good_run_has_no_findings(good_run: Path) -> None:
    assert all(
        line.endswith(" ok") for line in succeed("verify", str(good_run)).output.splitlines()
    )


def test_drawn_samples_are_no_finding(tmp_path: Path) -> None:
    train_on(1, *TINY, "data.sampling=balanced", "epochs=1", f"output_dir={tmp_path}", "name=run")
    assert findings_of(tmp_path / "run") == []


def test_findings_are_printed_and_the_exit_code_is_1(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "step-00000016.pt"
    path.rename(path.with_name("step-00000099.pt"))
    path.write_bytes(path.with_name("step-00000099.pt").read_bytes()[:-100])
    done = launch("verify", str(run_dir))
    assert done.code == 1
    assert "step-00000016.pt: does not end with a checksum" in done.output
    assert "step-00000099.pt: contains step 16" in done.output
    assert "Traceback" not in done.output


def with_another_digest(text: str) -> str:
    record = next(line for line in text.splitlines() if "samples/digest" in line)
    digest = json.loads(record)["samples/digest"]
    return text.replace(digest, f"{int(digest, 16) ^ 1:016x}")


@pytest.mark.parametrize(
    ("name", "change", "finding"),
    [
        (
            "metrics.jsonl",
            lambda text: text[:-20],
            "metrics.jsonl has damaged lines, which were left out: 1.",
        ),
        (
            "metrics.jsonl",
            lambda text: text.replace('"step"', "\x00step", 1),
            "metrics.jsonl has damaged lines, which were left out: 1.",
        ),
        (
            "metrics.jsonl",
            lambda text: text.partition("\n")[2].partition("\n")[2],
            "tensorboard: train/loss has 8 steps, but metrics.jsonl has 7",
        ),
        (
            "metrics.jsonl",
            lambda text: "\n".join(text.splitlines()[:2]) + "\n" + text,
            "metrics.jsonl: step 2 occurs more than once",
        ),
        ("metrics.jsonl", with_another_digest, "epoch 0: used 96 samples"),
        (
            "metrics.jsonl",
            lambda text: text.replace('"epoch": 0', '"epoch": [1]'),
            "epoch 0: metrics.jsonl has no digest",
        ),
        (
            "metrics.jsonl",
            lambda text: text.replace('"samples/count": 96', '"samples/count": "\\n\\u001b[31m"'),
            "epoch 0: used \\n\\x1b[31m samples",
        ),
        ("summary.json", lambda text: text[:40], "summary.json is damaged."),
        (
            "summary.json",
            lambda text: text.replace('"steps": 16', '"steps": 80'),
            "summary.json: is of step 80",
        ),
        ("config.yaml", lambda text: "]" + text, "config.yaml is damaged."),
        ("config.yaml", lambda text: f"x: !!int ''\n{text}", "config.yaml is damaged."),
    ],
)
def test_damage_is_a_finding(
    name: str, change: Callable[[str], str], finding: str, run_dir: Path
) -> None:
    path = run_dir / name
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    assert any(line.startswith(finding) for line in findings_of(run_dir)), findings_of(run_dir)


def test_files_that_cannot_be_read_are_findings(run_dir: Path) -> None:
    os.truncate(run_dir / "metrics.jsonl", 2**40)
    (run_dir / "tensorboard" / "events.out.tfevents.1.x").mkdir()
    found = findings_of(run_dir)
    assert "metrics.jsonl is too large and was left out." in found, found
    assert "tensorboard: cannot be read (Is a directory)" in found, found


def test_tensorboard_is_compared_whole(tmp_path: Path) -> None:
    loggers = TensorBoardLogger(TensorBoardConfig(), tmp_path), JsonlLogger(JsonlConfig(), tmp_path)
    for logger in loggers:
        for step in range(1, 10_002):  # TensorBoard's reader keeps 10,000 steps by default
            logger.scalars({"train/loss": 0.5}, step)
        logger.close()
    assert list(check_tensorboard(RunFiles(tmp_path))) == []


@pytest.mark.fault("verify of outputs with a bit flipped, or cut")
def test_no_flipped_bit_and_no_cut_ends_in_a_traceback(good_run: Path, tmp_path: Path) -> None:
    numbers = random.Random(0)
    files = [path.relative_to(good_run) for path in sorted(good_run.rglob("*")) if path.is_file()]
    for number in range(40):
        copy = shutil.copytree(good_run, tmp_path / str(number))
        path = copy / numbers.choice(files)
        data = bytearray(path.read_bytes())
        position = numbers.randrange(len(data))
        if number % 3:
            data[position] ^= 1 << numbers.randrange(8)
        path.write_bytes(data if number % 3 else data[:position])
        findings = findings_of(copy)
        assert findings or path.suffix != ".pt", path


def test_tensors_of_checkpoints_are_not_kept_in_memory(good_run: Path) -> None:
    states = RunFiles(good_run).states.values()
    assert states
    assert all({"model", "optimizer"}.isdisjoint(state) for state in states)
