"""The examples as a user runs them, and their parts on the command line."""

import ast
import os
import re
import signal
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from PIL import Image
from processes import (
    EXAMPLES,
    OWN,
    ROOT,
    end_with_descendants,
    launch,
    plugins,
    run_command,
    start_launch,
    succeed,
    wait_for,
    with_path,
)
from runs import (
    assert_bitwise,
    newest_step,
    read_summary,
    records,
    trained_state,
)

import ddp_trainer
from ddp_trainer import schemas

SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def children_of(process: BaseProcess) -> list[int]:
    return [*map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]


def imports(code: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each import in `code`; the name is "" for ``import module``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((item.name, "") for item in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or ".", item.name) for item in node.names)


def test_examples_and_docs_import_public_names_only() -> None:
    scripts = [script.read_text() for script in SCRIPTS]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [
        block
        for page in pages
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    assert len(scripts) >= 6
    assert len(blocks) >= 10
    for module, name in {pair for code in [*scripts, *blocks] for pair in imports(code)}:
        if module.startswith("ddp_trainer"):
            public = {"ddp_trainer": ddp_trainer.__all__, "ddp_trainer.schemas": dir(schemas)}
            assert name in public[module]
    allowed = {"ddp_trainer", "torch", *sys.stdlib_module_names}
    assert {module.partition(".")[0] for code in scripts for module, _ in imports(code)} <= allowed


# --- as scripts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs_as_a_script(script: Path, tmp_path: Path) -> None:
    assert len(script.read_text().splitlines()) <= 60
    # forked, to be faster: only its ranks are new processes
    done = launch(script=str(script), cwd=tmp_path, deadline=180, PYTHONPATH=with_path())
    assert done.code == 0, done.output
    top1 = re.search(r"top-1 ([01]\.\d+)", done.output)
    [run_dir] = [path for path in (tmp_path / "outputs").iterdir() if path.is_dir()]
    summary = read_summary(run_dir)
    assert summary["world_size"] == 2
    if script.stem == "own_observer":
        assert summary["status"] == "stopped_early"
        assert summary["stop_reason"] in done.output
    else:
        assert summary["status"] == "finished"
        assert top1, done.output
        assert float(top1[1]) == pytest.approx(summary["eval/top1"], abs=1e-4)
        chance = 0.5 if script.stem == "own_dataset" else 0.1
        assert summary["eval/top1"] > 1.5 * chance


def test_finetune_trains_scores_exports_and_reports(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        (pictures / name).mkdir(parents=True)
        for number in range(15):
            image = Image.new("RGB", (40, 36 + number), colour)
            image.save(pictures / name / f"{number}.png")
    run_dir = tmp_path / "runs" / "pets"
    words = ["model=lenet", "data.image_size=32", "epochs=1", "global_batch_size=8"]
    variables = {"PYTHON": sys.executable, "RUN": str(run_dir), "PYTHONPATH": with_path()}
    done = run_command(
        ["bash", str(EXAMPLES / "finetune.sh"), str(pictures), "null", *words],
        cwd=tmp_path,
        deadline=180,
        NPROC="2",
        **variables,
    )
    assert done.code == 0, done.output
    assert read_summary(run_dir)["world_size"] == 2
    for name in ("evaluation", "export", "report.html"):
        assert (run_dir / name).exists(), name


# --- on the command line --------------------------------------------------------------------------

ALL_OWN = (
    "data=bars",
    "model=lenet",
    "loss=own_focal",
    "metric=[own_balanced]",
    "observer=[stop_below]",
    "observer.stop_below.loss=1000",
    "observer.stop_below.windows=75",  # at 2 steps a window: it stops after step 150
    "log_every_steps=2",
    "epochs=20",
    "global_batch_size=48",  # 10 steps an epoch
    "checkpoint.every_steps=3",
    "precision=fp32",
    "num_threads=1",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with all own parts on 2 ranks; return the run directory."""
    folder = tmp_path_factory.mktemp("own")
    succeed(*ALL_OWN, f"output_dir={folder}", "name=whole", ranks=2, cwd=folder, **plugins(OWN))
    return folder / "whole"


@pytest.mark.fault("SIGKILL of a run with own parts")
def test_own_parts_that_are_killed_and_resumed_end_as_if_left_alone(whole: Path) -> None:
    folder = whole.parent
    killed = folder / "killed"
    words = [*ALL_OWN, f"output_dir={folder}", "name=killed"]
    process = start_launch(["-m", "ddp_trainer", *words], ranks=2, cwd=folder, **plugins(OWN))
    try:
        wait_for(lambda: newest_step(killed))
        for rank in children_of(process):
            os.kill(rank, signal.SIGKILL)
        process.join(60)
    finally:
        end_with_descendants(process)
    assert process.exitcode == 1
    assert newest_step(killed) < 150
    succeed(*words, ranks=2, cwd=folder, **plugins(OWN))

    assert "resumed from" in (killed / "train.log").read_text()
    assert_bitwise(trained_state(whole), trained_state(killed))
    for tag in ("train/loss", "eval/own_balanced"):
        values = [[one[tag] for one in records(run, tag)] for run in (whole, killed)]
        assert values[0], tag
        assert values[0] == values[1], tag
    ends = [
        {key: read_summary(run)[key] for key in ("status", "stop_reason", "steps")}
        for run in (whole, killed)
    ]
    assert ends[0] == ends[1]


def test_a_stop_of_an_observer_is_final_until_the_observer_changes(whole: Path) -> None:
    first = read_summary(whole)
    assert (first["status"], first["steps"]) == ("stopped_early", 150)
    assert re.fullmatch(r"the loss 0\.\d+ is below 1000\.0", first["stop_reason"])

    command = (*ALL_OWN, f"output_dir={whole.parent}", "name=whole")
    repeated = succeed(*command, ranks=2, cwd=whole.parent, **plugins(OWN))
    assert "nothing left to train" in repeated.output
    assert f"test acc {first['eval/top1']:.4f}" in repeated.output
    assert read_summary(whole) == first

    (whole / "summary.json").unlink()
    succeed(*command, ranks=2, cwd=whole.parent, **plugins(OWN))
    again = read_summary(whole)
    assert {key: again[key] for key in first if "second" not in key} | NOT_MEASURED == {
        key: first[key] for key in first if "second" not in key
    } | NOT_MEASURED

    changed = "observer.stop_below.loss=1e-9"
    succeed(*command, changed, ranks=2, cwd=whole.parent, **plugins(OWN))
    last = read_summary(whole)
    assert (last["status"], last["stop_reason"], last["steps"]) == ("finished", None, 200)


NOT_MEASURED = dict.fromkeys(("rank_own_ms", "matmul_utilization", "mfu"))
"""Fields of a summary that a launch which trains nothing cannot have."""


# --- what a user sees of own parts ----------------------------------------------------------------
