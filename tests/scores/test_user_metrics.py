"""The metrics of an evaluation: their values, and that they do not depend on the world size."""

from pathlib import Path

import numpy as np
import pytest
import torch
from runs import TINY, records, train_on

from ddp_trainer.config.metrics import BalancedAccuracyConfig, MacroF1Config
from ddp_trainer.scores.metrics import build_balanced_accuracy, build_macro_f1

METRICS = "metric=[balanced_accuracy,macro_f1]"


@pytest.mark.parametrize("seed", range(4))
def test_metrics_are_means_over_classes(seed: int) -> None:
    random = np.random.default_rng(seed)
    labels = random.choice(5, 200, p=[0.5, 0.3, 0.15, 0.05, 0])  # the last class has no sample
    probabilities = random.dirichlet(np.ones(5), 200) + np.eye(5)[labels] * (seed / 4)
    predictions = probabilities.argmax(1)
    recalls = []
    f1s = []
    for label in np.unique([labels, predictions]):
        if label in labels:
            recalls.append(np.mean(predictions[labels == label] == label))
        is_predicted = predictions == label
        precision = np.mean(labels[is_predicted] == label) if is_predicted.any() else 0.0
        recall = recalls[-1] if label in labels else 0.0
        both = precision + recall
        f1s.append(2 * precision * recall / both if both else 0.0)
    arguments = torch.tensor(probabilities).float(), torch.tensor(labels)
    balanced = build_balanced_accuracy(BalancedAccuracyConfig())(*arguments)
    assert balanced == pytest.approx(np.mean(recalls))
    assert build_macro_f1(MacroF1Config())(*arguments) == pytest.approx(np.mean(f1s))


def test_metrics_are_logged_and_do_not_depend_on_the_world_size(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 3):
        words = (*TINY, METRICS, f"output_dir={tmp_path}", f"name={ranks}", "optimizer.lr=0.01")
        train_on(ranks, *words)
        logged = records(tmp_path / str(ranks), "eval/macro_f1")
        assert len(logged) == 2
        found.append([(one["eval/balanced_accuracy"], one["eval/macro_f1"]) for one in logged])
    assert np.array(found[0]) == pytest.approx(np.array(found[1]))
    assert all(0 <= value <= 1 for pair in found[0] for value in pair)
