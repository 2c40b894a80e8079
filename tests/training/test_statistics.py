"""BatchNorm statistics at the end of short epochs: the evaluation is that of the weights."""

from pathlib import Path

import pytest
import torch
from runs import BATCHNORM, compose, newest_checkpoint, records, train_on

from ddp_trainer.training import statistics
from ddp_trainer.training_run import run

SHORT = (
    *BATCHNORM,
    "data=digits",
    "global_batch_size=360",  # four steps an epoch
    "epochs=4",
    "optimizer.lr=0.5",
    "scheduler=constant",
    "precision=fp32",
    "logger=[jsonl]",
)


def losses(run_dir: Path) -> list[float]:
    return [float(record["eval/loss"]) for record in records(run_dir, "eval/loss")]


@pytest.mark.parametrize("words", [(), ("ema.decay=0.5",)], ids=["model", "average"])
def test_the_evaluation_of_a_short_epoch_is_that_of_the_weights(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_on(1, *SHORT, *words, f"output_dir={tmp_path}", "name=new")
    monkeypatch.setattr(statistics, "SHORT_EPOCH", 0)
    run(compose(*SHORT, *words, f"output_dir={tmp_path}", "name=lagging"))
    assert max(losses(tmp_path / "new")[1:]) < 1.0
    assert max(losses(tmp_path / "lagging")[1:]) > 2.0
    new, lagging = (newest_checkpoint(tmp_path / name)["model"] for name in ("new", "lagging"))
    is_weight = {name: "running_" not in name and "tracked" not in name for name in new}
    assert any(is_weight.values())
    for name, value in new.items():
        if is_weight[name]:
            assert torch.equal(value, lagging[name]), name


def test_frozen_layers_and_long_epochs_keep_their_statistics(tmp_path: Path) -> None:
    words = (*SHORT, "epochs=1", f"output_dir={tmp_path}")
    train_on(1, *words, "name=frozen", "model.freeze=[bn1]")
    model = newest_checkpoint(tmp_path / "frozen")["model"]
    assert not model["bn1.running_mean"].any()
    train_on(1, *words, "name=long", "global_batch_size=72")  # 20 steps an epoch
    assert newest_checkpoint(tmp_path / "long")["model"]["bn1.num_batches_tracked"] == 20
