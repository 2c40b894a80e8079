"""Resume: a run that was stopped anywhere and resumed ends as if it had been left alone."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import on_ranks
from runs import (
    BATCHNORM,
    TINY,
    assert_bitwise,
    compose,
    newest_checkpoint,
    read_summary,
    records,
    train_all,
    train_on,
    trained_state,
)

from ddp_trainer.checkpoint.file import read_state
from ddp_trainer.config.schema import Config
from ddp_trainer.training_run import run

MIDDLE = (
    *TINY,
    "logger=[jsonl]",
    "data.num_eval=5",
    "checkpoint.every_steps=3",
    "data.augment.random_crop_padding=2",
)
VARIANTS = {
    "momentum": (),
    "adamw": ("optimizer=adamw",),
    "accumulation": ("gradient_accumulation_steps=2",),
    "bf16": ("precision=bf16",),
    "batchnorm": (*BATCHNORM, "data.num_train=72", "epochs=1"),
}
AT = {2: [*VARIANTS], 3: ["momentum", "batchnorm"], 4: ["momentum"]}
"""The variants by number of ranks: what a variant adds does not depend on it, unlike the order of
sums.
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that trains variants on so many ranks: left alone in whole-…, resumed in
    parts-…
    """

    @functools.cache
    def train(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"W{ranks}")
        jobs: list[tuple[str, ...]] = []
        for variant in AT[ranks]:
            common = (*MIDDLE, *VARIANTS[variant], f"output_dir={folder}")
            parts = (*common, f"name=parts-{variant}")
            jobs += [(*common, f"name=whole-{variant}"), (*parts, "max_steps=5"), parts]
        train_all(ranks, jobs)
        return folder

    return train


@pytest.mark.parametrize(
    ("ranks", "variant"), [(ranks, variant) for ranks in AT for variant in AT[ranks]]
)
def test_stopped_in_mid_epoch_and_resumed_is_bitwise_the_same(
    ranks: int, variant: str, trained: Callable[[int], Path]
) -> None:
    whole, parts = (trained(ranks) / f"{one}-{variant}" for one in ("whole", "parts"))
    assert read_summary(parts)["steps"] == read_summary(whole)["steps"] > 5
    assert_bitwise(trained_state(whole), trained_state(parts))
    digests = [
        [record["samples/digest"] for record in records(run, "samples/digest")]
        for run in (whole, parts)
    ]
    assert digests[0] == digests[1][-len(digests[0]) :]


def test_resumed_on_other_numbers_of_ranks_uses_the_same_samples(
    trained: Callable[[int], Path], train_in: Callable[..., Path]
) -> None:
    whole = newest_checkpoint(trained(2) / "whole-momentum")
    train_in("parts", *MIDDLE, "max_steps=5", ranks=4)
    train_in("parts", *MIDDLE, "max_steps=11", ranks=1)
    parts = newest_checkpoint(train_in("parts", *MIDDLE, ranks=3))
    assert_bitwise(whole["progress"]["digest"], parts["progress"]["digest"])
    torch.testing.assert_close(whole["model"], parts["model"])


def test_a_run_may_go_on_in_another_memory_layout(
    trained: Callable[[int], Path], tmp_path: Path
) -> None:
    common = (*MIDDLE, f"output_dir={tmp_path}", "name=run")
    train_all(1, [(*common, "channels_last=true", "max_steps=5"), (*common, "channels_last=false")])
    whole = newest_checkpoint(trained(2) / "whole-momentum")
    torch.testing.assert_close(whole["model"], newest_checkpoint(tmp_path / "run")["model"])


def stopped_by(config: Config, stop_file: Path) -> str:
    os.environ["DDP_TRAINER_STOP_FILE"] = str(stop_file)
    return run(config).to_json()


def test_a_run_that_was_stopped_beyond_its_new_end_is_evaluated(tmp_path: Path) -> None:
    words = (*TINY, f"output_dir={tmp_path}", "name=run")
    on_ranks(1, stopped_by, compose(*words), tmp_path)
    assert read_summary(tmp_path / "run")["status"] == "stopped"
    summary = train_on(1, *words, "max_steps=1")
    assert (summary["status"], summary["steps"], summary["eval/count"]) == ("max_steps", 1, 31)
    assert not (tmp_path / "run/stopped").exists()


def test_the_report_of_a_stopped_run_has_no_scores_of_an_earlier_step(tmp_path: Path) -> None:
    words = (*TINY, f"output_dir={tmp_path}", "name=run", "report=true", "checkpoint.every_steps=1")
    config = compose(*words, "checkpoint.keep_last=100")
    on_ranks(1, stopped_by, config, tmp_path / "run/checkpoints/step-00000008.pt")
    assert 8 < read_summary(tmp_path / "run")["steps"] < 16
    assert (tmp_path / "run/report.html").exists()
    assert not (tmp_path / "run/evaluation").exists()


@pytest.mark.fault("more epochs at resume")
def test_more_epochs_continue_on_the_longer_schedule(tmp_path: Path) -> None:
    common = (*TINY, f"output_dir={tmp_path}", "log_every_steps=1")
    train_all(
        1,
        [
            (*common, "name=whole", "epochs=4"),
            (*common, "name=parts"),
            (*common, "name=parts", "epochs=4"),
        ],
    )
    whole, parts = (
        {r["step"]: r["optim/lr"] for r in records(tmp_path / name, "optim/lr")}
        for name in ("whole", "parts")
    )
    later = range(17, 33)
    assert [parts[step] for step in later] == [whole[step] for step in later]
    log = (tmp_path / "parts/train.log").read_text()
    assert "INFO changed since the checkpoint: epochs: 2 → 4\n" in log
    assert (
        f"WARNING the schedule is now for 4 epochs, not 2: the learning rate of the last step was"
        f" {parts[16]:.3g}, and that of the next step is {parts[17]:.3g}\n"
    ) in log


def test_a_warm_up_longer_than_the_training_takes_half_of_it(tmp_path: Path) -> None:
    words = (*TINY, f"output_dir={tmp_path}", "log_every_steps=1", "scheduler.warmup_epochs=5")
    train_all(
        1,
        [
            (*words, "name=short"),
            (*words, "name=fitting", "scheduler.warmup_epochs=1"),
            (*words, "name=short", "epochs=6"),
        ],
    )
    short, fitting = (
        {r["step"]: r["optim/lr"] for r in records(tmp_path / name, "optim/lr")}
        for name in ("short", "fitting")
    )
    assert fitting == {step: short[step] for step in range(1, 17)}
    peak = max(short.values())
    assert [short[step] for step in (17, 40)] == pytest.approx([peak * 17 / 40, peak])
    assert (
        "WARNING scheduler.warmup_epochs=5 is more than epochs=2: the warm-up takes half of the"
        " training"
    ) in (tmp_path / "short/train.log").read_text()


def test_saves_come_by_the_clock_too(train_in: Callable[..., Path]) -> None:
    run_dir = train_in(
        "run", *TINY, "checkpoint.every_seconds=0.0001", "log_every_steps=1", ranks=2
    )
    steps = [int(path.stem[5:]) for path in (run_dir / "checkpoints").glob("step-*.pt")]
    assert sorted(steps) == [14, 15, 16]


def test_the_best_checkpoint_stays(train_in: Callable[..., Path]) -> None:
    run_dir = train_in(
        "run", "model=lenet", "data=digits", "epochs=6", "checkpoint.keep_last=1", "precision=fp32"
    )
    best = torch.load(run_dir / "checkpoints/best.pt", weights_only=True)
    top1 = [record["eval/top1"] for record in records(run_dir, "eval/top1")]
    assert best["best_top1"] == max(top1) == read_summary(run_dir)["best_top1"]
    assert len(list((run_dir / "checkpoints").glob("step-*.pt"))) == 1


def test_a_best_checkpoint_that_cannot_be_kept_ends_no_run(
    tmp_path: Path, train_in: Callable[..., Path]
) -> None:
    (tmp_path / "run/checkpoints/best.pt/in the way").mkdir(parents=True)  # no file gets there
    run_dir = train_in("run", *TINY)
    assert read_summary(run_dir)["status"] == "finished"
    assert "best.pt was not written (" in (run_dir / "train.log").read_text()
    assert not list((run_dir / "checkpoints").glob(".*"))
    assert newest_checkpoint(run_dir)["step"] == read_summary(run_dir)["steps"]
    assert newest_checkpoint(run_dir)["best_top1"] is None

    (run_dir / "checkpoints/best.pt/in the way").rmdir()
    (run_dir / "checkpoints/best.pt").rmdir()
    train_in("run", *TINY, "epochs=3")  # no better than before, but the best that can be saved
    best = torch.load(run_dir / "checkpoints/best.pt", weights_only=True)
    assert best["step"] == 24
    assert best["best_top1"] == read_summary(run_dir)["best_top1"]


def test_a_model_that_is_always_wrong_is_the_best_so_far(train_in: Callable[..., Path]) -> None:
    scores = []
    for seed in range(3):
        run_dir = train_in(f"run-{seed}", *TINY, "epochs=1", "data.num_eval=1", f"seed={seed}")
        scores.append(read_summary(run_dir)["eval/top1"])
        assert (run_dir / "checkpoints/best.pt").exists()
    assert 0 in scores


def test_a_program_that_changes_the_best_checkpoint_changes_no_other(
    train_in: Callable[..., Path],
) -> None:
    run_dir = train_in("run", *TINY, "epochs=1")
    with (run_dir / "checkpoints/best.pt").open("r+b") as file:
        file.write(b"changed")
    assert read_state(run_dir / "checkpoints/step-00000008.pt")["step"] == 8
