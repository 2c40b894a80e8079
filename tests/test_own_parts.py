"""Own parts on the command line: in the help, with wrong keys, and with code that raises."""

import re
from pathlib import Path

import pytest
from processes import OWN, launch, plugins, succeed
from runs import TINY

from ddp_trainer.config.errors import USER_ERROR

TESTS = Path(__file__).parent


def test_help_lists_own_parts_without_torch() -> None:
    """The examples import torch themselves, so that only the lists are compared."""
    text = succeed("--help", **plugins(OWN)).output
    keys = succeed("train", "--help", **plugins(OWN)).output
    for group, name in (
        ("data", "bars"),
        ("loss", "own_focal"),
        ("metric", "own_balanced"),
        ("observer", "stop_below"),
    ):
        assert re.search(rf"^  {group} .*\b{name}\b", text, re.MULTILINE), group
        assert f"\n{group}={name}\n" in keys
    assert re.search(r"^  observer\.stop_below\.windows=2 +Number of log", keys, re.MULTILINE)
    assert re.search(r"^  loss\.gamma=2\.0 +Exponent", keys, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss=own_focal", "loss.gama=1"], "loss.gama=1 is unknown: did you mean loss.gamma?"),
        (["loss=own_focal", "loss.gamma=much"], "loss.gamma=much must be a number"),
        (
            ["observer=[stop_below]", "observer.stop_below.windows=1.5"],
            "observer.stop_below.windows=1.5 must be a whole number",
        ),
        (
            ["observer=[stop_bellow]"],
            "observer=stop_bellow is not a valid choice: did you mean",
        ),
        (
            ["metric=[own_balance]"],
            "metric=own_balance is not a valid choice: did you mean",
        ),
    ],
)
def test_wrong_keys_of_own_parts_are_one_error(words: list[str], message: str) -> None:
    done = launch(*words, **plugins(OWN))
    assert (done.code, done.output.count("\n")) == (USER_ERROR, 1), done.output
    assert done.output.startswith(f"error: {message}"), done.output


def test_a_loss_that_returns_one_number_is_one_error(tmp_path: Path) -> None:
    done = launch(*TINY, "loss=mean", cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == USER_ERROR, done.output
    assert done.output.splitlines()[-1].startswith(
        "error: loss=mean must return one value per sample, a tensor of the shape [2] here, and "
        "returns a tensor of the shape []: for a loss of torch, set reduction='none'"
    )


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (
            ["observer=[divide]", "observer.divide.event=uneven"],
            "ObserverError: rank_values returned {'ranks': 21, 'divide': 2} numbers, but {",
        ),
        (["metric=[text]"], "MetricError: metric=text failed (ValueError: could not convert"),
        (
            ["metric=[in_place,macro_f1]"],
            "MetricError: metric=in_place changes its probabilities or labels in place",
        ),
        *(
            (
                [
                    "observer=[divide]",
                    f"observer.divide.event={event}",
                    f"observer.divide.rank={rank}",
                ],
                f"ObserverError: observer=divide failed in {event} (ZeroDivisionError: division",
            )
            for event, rank in (
                ("on_step", 1),
                ("on_evaluation", 0),
                ("on_end", 1),
                ("rank_values", 1),
                ("summary_values", 0),
                ("state_dict", 0),
            )
        ),
    ],
)
def test_own_code_that_raises_ends_the_job_with_its_name(
    words: list[str], cause: str, tmp_path: Path
) -> None:
    done = launch(*TINY, *words, ranks=2, cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == 1, done.output
    assert cause in done.output
    assert done.output.count(f"{cause.partition(':')[0]}: ") == 1, done.output


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "integers",
            "loss=wrong must return float values with a gradient",
        ),
        (
            "detached",
            "loss=wrong must return float values with a gradient",
        ),
    ],
)
def test_a_loss_that_cannot_be_right_is_one_error(kind: str, message: str, tmp_path: Path) -> None:
    words = ("loss=wrong", f"loss.kind={kind}")
    done = launch(*TINY, *words, cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == USER_ERROR, done.output
    assert message in done.output


def test_a_loss_that_is_wrong_in_a_later_step_names_its_rank(tmp_path: Path) -> None:
    words = (
        "loss=wrong",
        "loss.kind=mean",
        "loss.rank=1",
    )  # for a batch that is not of two samples
    done = launch(*TINY, *words, ranks=2, cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == 1, done.output
    assert re.search(r"rank 1 on \S+ failed first, in forward after step 0", done.output)
    message = "RuntimeError: the loss must return one value per sample, [6], and returns []"
    assert done.output.count(message) == 1, done.output


def test_a_loss_that_is_wrong_on_one_rank_names_it(tmp_path: Path) -> None:
    words = ("loss=wrong", "loss.kind=detached", "loss.rank=1")
    done = launch(*TINY, *words, ranks=2, cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == 1, done.output  # of torchrun
    assert done.output.count("error: rank 1: loss=wrong must return float values") == 1
    assert "failed first" not in done.output


def test_a_builder_that_exits_on_one_rank_is_named(tmp_path: Path) -> None:
    words = (*TINY, "metric=[leaving]")
    done = launch(*words, ranks=2, cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == 1, done.output  # of torchrun
    assert done.output.count("error: rank 1: metric=leaving: the builder has called exit") == 1
    assert "failed first" not in done.output


def test_a_part_that_calls_exit_is_no_success(tmp_path: Path) -> None:
    done = launch(*TINY, "metric=[exit]", cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == 1, done.output
    assert "ExitError: a part of the run has called sys.exit(0)" in done.output


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mask", "mask of the model is infinite or NaN before the first step"),
        ("extra", "(model.1._extra_state has the type dict): use only tensors, numbers, texts"),
    ],
)
def test_a_model_that_no_checkpoint_can_hold_is_one_error_before_the_first_step(
    kind: str, message: str, tmp_path: Path
) -> None:
    words = ("model=unsaved", f"model.kind={kind}")
    done = launch(*TINY, *words, cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == USER_ERROR, done.output
    assert message in done.output.splitlines()[-1]
    assert "epoch 1" not in done.output


def test_numbers_of_numpy_in_the_state_are_saved(tmp_path: Path) -> None:
    variables = plugins("broken_parts", TESTS)
    words = (*TINY, "scheduler=numpy", "name=run", "output_dir=.")
    succeed(*words, "max_steps=5", cwd=tmp_path, **variables)
    done = succeed(*words, cwd=tmp_path, **variables)
    assert "resumed from run/checkpoints/step-00000005.pt" in done.output
    succeed("evaluate", "run", cwd=tmp_path, **variables)


def test_a_state_that_can_no_longer_be_read_is_no_success(tmp_path: Path) -> None:
    words = (*TINY, "observer=[growing]", "name=run", "output_dir=.", "max_steps=4")
    words = (*words, "checkpoint.every_steps=1")
    done = launch(*words, cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == 1, done.output
    assert "it has a tuple of more than 100,000 items" in done.output
    assert "the last good checkpoint is run/checkpoints/step-00000002.pt: use only tensors" in (
        done.output
    )


def test_a_thread_that_keeps_the_process_is_named(tmp_path: Path) -> None:
    done = launch(*TINY, "observer=[thread]", cwd=tmp_path, **plugins("broken_parts", TESTS))
    assert done.code == 0, done.output
    assert "has done its work, and waits for the threads poller: start them with daemon=True" in (
        done.output
    )
