"""`select_by`: the value of an evaluation that chooses best.pt."""

import math
from pathlib import Path

import pytest
import torch
from processes import launch
from runs import TINY, read_summary, records, train_on

WORDS = (*TINY, "epochs=5", "optimizer.lr=0.3", "metric=[macro_f1,balanced_accuracy]")
BEST = {"eval/loss": min, "eval/macro_f1": max}


def check_best(run_dir: Path, select_by: str) -> None:
    """Check that best.pt has the best value, and its top-1."""
    best = torch.load(run_dir / "checkpoints/best.pt", weights_only=True)
    epochs = [record for record in records(run_dir, "eval/top1") if record["step"] % 8 == 0]
    assert len(epochs) == 5
    summary = read_summary(run_dir)
    chosen = BEST[select_by](epochs, key=lambda record: record[select_by])
    assert best["step"] == chosen["step"]
    assert best["best_value"] == summary["best_value"] == chosen[select_by]
    assert best["best_top1"] == summary["best_top1"] == chosen["eval/top1"]
    assert summary["select_by"] == select_by


@pytest.mark.parametrize("select_by", BEST)
def test_the_best_checkpoint_has_the_best_value(select_by: str, tmp_path: Path) -> None:
    words = (*WORDS, f"select_by={select_by}", f"output_dir={tmp_path}", "name=run")
    run_dir = tmp_path / "run"
    train_on(2, *words, "max_steps=20")
    train_on(1, *words)  # resumed, it compares with the values before
    check_best(run_dir, select_by)
    assert (
        f"best test {select_by[5:]} {read_summary(run_dir)['best_value']:.4f}: "
        in (run_dir / "train.log").read_text()
    )


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    words = (*TINY, "data.num_eval=1", "metric=[auroc]", "select_by=eval/auroc")
    train_on(1, *words, f"output_dir={tmp_path}", "name=run")
    first = records(tmp_path / "run", "eval/top1")[0]
    assert math.isnan(float(first["eval/auroc"]))  # of one image
    assert not (tmp_path / "run/checkpoints/best.pt").exists()
    assert read_summary(tmp_path / "run")["best_value"] is None


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("select_by=eval/auroc",), "eval/top1, eval/loss; metric=[NAME] adds eval/NAME"),
        (("select_by=loss", "metric=[topk]"), "eval/top1, eval/loss, eval/topk; "),
    ],
)
def test_a_value_that_no_evaluation_has_is_one_error(
    words: tuple[str, ...], values: str, tmp_path: Path
) -> None:
    done = launch(*TINY, *words, f"output_dir={tmp_path}")
    assert done.code == 2
    [line] = done.output.splitlines()
    assert f"{words[0]} is no value of the evaluation: choose from {values}" in line
    assert not list(tmp_path.iterdir())


def test_early_stopping_watches_the_same_value(tmp_path: Path) -> None:
    words = (*TINY, "epochs=30", "select_by=eval/loss", "observer=[early_stopping]")
    summary = train_on(
        1, *words, "observer.early_stopping.patience=1", "optimizer.lr=1", f"output_dir={tmp_path}"
    )
    assert summary["status"] == "stopped_early"
    assert summary["stop_reason"].startswith("eval/loss has not improved since epoch ")
