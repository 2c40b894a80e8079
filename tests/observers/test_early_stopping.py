"""observer=[early_stopping]."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import launch
from runs import TINY, newest_checkpoint, read_summary, records, train_on

from ddp_trainer.config.metrics import MetricConfig
from ddp_trainer.config.observers import EarlyStoppingConfig
from ddp_trainer.config.schema import Config
from ddp_trainer.observers.early_stopping import EarlyStopping


class ErrorConfig(MetricConfig):
    """The config of a metric that is better if lower, as a plug-in may have it."""

    higher_is_better = False


def epochs_until_stop(values: list[float], **options: Any) -> tuple[int, str]:
    """Return after how many epochs with these values a stop is requested, and the reason."""
    config = EarlyStoppingConfig(**options)
    whole = Config()
    whole.metric = {"error": ErrorConfig()}
    observer = EarlyStopping(config)
    reasons: list[str] = []
    for epoch, value in enumerate(values):
        run: Any = SimpleNamespace(
            config=whole,
            values={config.monitor or "eval/top1": value},
            epoch=epoch,
            step=8 * (epoch + 1),
            steps_per_epoch=8,
            request_stop=reasons.append,
        )
        state = observer.state_dict()
        observer = EarlyStopping(config)  # as after a resume
        observer.load_state_dict(state)
        observer.on_evaluation(run)
        if reasons:
            return epoch + 1, reasons[0]
    return 0, ""


def test_it_stops_after_so_many_epochs_without_an_improvement() -> None:
    values = [0.5, 0.7, 0.7, 0.6, 0.71, 0.71, 0.71, 0.72]
    assert epochs_until_stop(values, patience=2) == (
        4,
        "eval/top1 has not improved since epoch 2 (0.7000)",
    )
    assert epochs_until_stop(values, patience=3) == (0, "")
    assert epochs_until_stop(values, patience=3, min_delta=0.05)[0] == 5


def test_a_lower_loss_is_better_and_a_metric_says_which() -> None:
    losses = [2.0, 1.0, 0.5, 0.25]
    assert epochs_until_stop(losses, monitor="eval/loss", patience=2)[0] == 0
    assert epochs_until_stop(losses, monitor="eval/top1", patience=2)[0] == 3
    assert epochs_until_stop(losses, monitor="eval/error", patience=1)[0] == 0


def test_a_value_that_is_not_finite_is_no_improvement() -> None:
    nan = float("nan")
    assert epochs_until_stop([nan, nan, 0.5, nan, nan], patience=3)[0] == 0
    assert epochs_until_stop([nan, nan, nan], patience=3)[1] == (
        "eval/top1 has not improved since epoch 0"
    )


WORDS = (*TINY, "epochs=40", "optimizer.lr=1e-9", "observer=[early_stopping]", "resume=auto")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_training_ends_after_the_epoch_of_the_whole_one(
    ranks: int, tmp_path: Path
) -> None:
    common = (*WORDS, "observer.early_stopping.patience=3", f"output_dir={tmp_path}")
    train_on(ranks, *common, "name=whole")
    train_on(ranks, *common, "name=parts", "max_steps=12")
    train_on(ranks, *common, "name=parts")
    whole, parts = (read_summary(tmp_path / name) for name in ("whole", "parts"))
    assert whole["status"] == parts["status"] == "stopped_early"
    assert whole["steps"] == parts["steps"] < 320
    assert whole["stop_reason"] == parts["stop_reason"]
    assert newest_checkpoint(tmp_path / "parts")["observers"]["early_stopping"]["fruitless"] == 3


def test_an_unknown_value_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    done = launch(
        *WORDS,
        "observer.early_stopping.monitor=eval/f1",
        "metric=[macro_f1]",
        f"output_dir={tmp_path}",
    )
    assert done.code == 2
    assert "monitor=eval/f1 is no value of the evaluation: choose from" in done.output
    assert "eval/macro_f1" in done.output


def test_a_metric_is_monitored(tmp_path: Path) -> None:
    words = (*WORDS, "metric=[auroc,topk]", "observer.early_stopping.monitor=eval/auroc")
    train_on(1, *words, "observer.early_stopping.patience=2", f"output_dir={tmp_path}", "name=run")
    assert read_summary(tmp_path / "run")["status"] == "stopped_early"
    assert {0 <= record["eval/topk"] <= 1 for record in records(tmp_path / "run", "eval/topk")} == {
        True
    }
