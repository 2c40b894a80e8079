"""The moving average of the weights: that of the definition, after a stop too, and what is
evaluated.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from runs import BATCHNORM, TINY, assert_bitwise, compose, train_all, trained_state
from torch.nn.functional import cross_entropy

from ddp_trainer.data.augmentation import Normalize
from ddp_trainer.data.build import build_datasets
from ddp_trainer.data.dataset import ImageTensors
from ddp_trainer.models import build_model

DECAY = 0.7
WORDS = (
    *TINY,
    *BATCHNORM,
    "data.num_train=48",
    "epochs=1",
    f"ema.decay={DECAY}",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=9",
)


def states(run_dir: Path) -> list[dict]:
    paths = sorted((run_dir / "checkpoints").glob("step-*.pt"))
    return [torch.load(path, weights_only=True) for path in paths]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_average_is_that_of_its_definition_and_survives_a_stop(
    ranks: int, tmp_path: Path
) -> None:
    common = (*WORDS, f"output_dir={tmp_path}")
    train_all(
        ranks,
        [(*common, "name=whole"), (*common, "name=parts", "max_steps=2"), (*common, "name=parts")],
    )
    whole = states(tmp_path / "whole")
    assert [state["step"] for state in whole] == [1, 2, 3, 4]
    for before, after in pairwise(whole):
        for name, value in after["model"].items():
            if not value.is_floating_point():
                assert torch.equal(after["ema"][name], value)
            # Statistics differ over ranks, and files have their mean. The epoch ends after step 4,
            # so that statistics are computed anew.
            elif "running" not in name or (ranks == 1 and after["step"] < 4):
                expected = DECAY * before["ema"][name] + (1 - DECAY) * value
                torch.testing.assert_close(after["ema"][name], expected, rtol=1e-5, atol=1e-6)
    assert_bitwise(trained_state(tmp_path / "whole"), trained_state(tmp_path / "parts"))


def test_the_average_is_evaluated(tmp_path: Path) -> None:
    train_all(1, [(*WORDS, f"output_dir={tmp_path}", "name=run")])
    state = states(tmp_path / "run")[-1]
    config = compose(*WORDS)
    evaluation = build_datasets(config.data).eval
    assert isinstance(evaluation, ImageTensors)
    layout = {"device": torch.device("cpu"), "memory_format": torch.channels_last}
    images = Normalize(config.data.mean, config.data.std, **layout)(evaluation.images)
    losses = {}
    for key in ("model", "ema"):
        model = build_model(config.model, image_shape=(1, 12, 12), num_classes=10).eval()
        model.load_state_dict(state[key])
        with torch.no_grad():
            losses[key] = cross_entropy(model(images), evaluation.labels).item()
    loss, _, count = state["progress"]["evaluation"]
    assert count == 31
    assert loss == pytest.approx(losses["ema"], rel=1e-4)
    assert abs(losses["ema"] - losses["model"]) > 1e-3


def test_without_a_decay_there_is_no_average(tmp_path: Path) -> None:
    train_all(1, [(*TINY, "epochs=1", f"output_dir={tmp_path}", "name=run")])
    assert states(tmp_path / "run")[-1]["ema"] is None
