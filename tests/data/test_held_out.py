"""The samples that are held out for evaluation: folds, and groups in one part only."""

import statistics
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, strategies as st
from processes import launch, succeed
from runs import TINY, read_summary
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.images import DataConfig
from ddp_trainer.data.dataset import Datasets, ImageTensors, per_sample
from ddp_trainer.data.held_out import distribute_groups, hold_out


class Labels(Dataset[Any]):
    """A data set whose images are never read."""

    def __init__(self, labels: Tensor, groups: Tensor | None = None) -> None:
        self.labels = labels
        self.groups = groups

    def __len__(self) -> int:
        return len(self.labels)


def folds(split: Any, num_folds: int) -> list[list[int]]:
    """Return the ids of the samples in each fold."""
    found = []
    for fold in range(num_folds):
        config = DataConfig(name="labels", fold=fold, num_folds=num_folds)
        names = [str(number) for number in range(10)]
        datasets = hold_out(Datasets(train=split, eval=split, class_names=names), config)
        assert isinstance(datasets.train, Subset)
        assert isinstance(datasets.eval, Subset)
        ids = list(datasets.eval.indices)
        assert sorted([*datasets.train.indices, *ids]) == list(range(len(split)))
        found.append(ids)
    return found


@given(st.lists(st.integers(0, 4), min_size=12, max_size=200), st.integers(2, 12))
def test_each_sample_is_in_one_fold_and_each_class_in_all(labels: list[int], k: int) -> None:
    split = Labels(torch.tensor(labels))
    found = folds(split, k)
    assert sorted(chain.from_iterable(found)) == list(range(len(labels)))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    for label in set(labels):
        counts = [sum(labels[index] == label for index in ids) for ids in found]
        assert max(counts) - min(counts) <= 1


@given(st.data(), st.integers(2, 6))
def test_a_group_is_in_one_fold(data: st.DataObject, k: int) -> None:
    groups = data.draw(st.lists(st.integers(-20, 20), min_size=20, max_size=150))
    groups += list(range(100, 100 + k))
    labels = data.draw(st.lists(st.integers(0, 4), min_size=len(groups), max_size=len(groups)))
    found = folds(Labels(torch.tensor(labels), torch.tensor(groups)), k)
    assert sorted(chain.from_iterable(found)) == list(range(len(labels)))
    by_fold = [{groups[index] for index in ids} for ids in found]
    assert sum(map(len, by_fold)) == len(set(groups))


def test_folds_of_groups_have_about_the_same_share_of_each_class() -> None:
    """100 patients with 1 to 30 images, most of one class, which is rare for some patients."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 31, (100,), generator=random)
    groups = torch.arange(100).repeat_interleave(sizes)
    favorite = torch.randint(0, 5, (100,), generator=random).clamp(max=3)[groups]
    draws = torch.rand(len(groups), generator=random)
    labels = torch.where(draws < 0.7, favorite, torch.randint(0, 4, groups.shape, generator=random))
    part = distribute_groups(groups, labels, [0.2] * 5)
    expected = torch.bincount(labels, minlength=4) / 5
    for fold in range(5):
        counts = torch.bincount(labels[part == fold], minlength=4)
        assert (counts / expected - 1).abs().max() < 0.1

    # groups dealt out at random differ by more
    random_part = torch.randint(0, 5, (100,), generator=random)[groups]
    shares = [torch.bincount(labels[random_part == fold], minlength=4) for fold in range(5)]
    assert max(float((counts / expected - 1).abs().max()) for counts in shares) > 0.2


@pytest.mark.parametrize("groups_of_a_class", [1, 2])
def test_groups_of_one_class_each_fill_all_folds(groups_of_a_class: int) -> None:
    """There are fewer groups of each class than folds."""
    groups = torch.arange(3 * groups_of_a_class).repeat_interleave(5)
    found = folds(Labels(groups // groups_of_a_class, groups), 3)
    assert [len(ids) for ids in found] == [5 * groups_of_a_class] * 3


def test_fewer_groups_than_folds_are_refused() -> None:
    split = Labels(torch.zeros(9, dtype=torch.long), torch.tensor([1, 2, 3] * 3))
    with pytest.raises(ConfigError, match=r"^data\.num_folds=4 must be at most the number of gro"):
        folds(split, 4)
    with pytest.raises(ConfigError, match=r"^data\.num_folds=10 must be at most .* images, 9$"):
        folds(Labels(torch.zeros(9, dtype=torch.long)), 10)


def test_a_fraction_of_one_group_is_refused() -> None:
    split = Labels(torch.arange(60) % 2, torch.zeros(60))
    config = DataConfig(name="labels", validation_fraction=0.99)
    with pytest.raises(ConfigError, match=r"^data\.validation_fraction=0\.99 needs two or more gr"):
        hold_out(Datasets(split, split, ["a", "b"]), config)


def test_images_in_memory_have_folds_too() -> None:
    labels = torch.arange(40) % 4
    images = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1)
    split = ImageTensors(images, labels)
    seen = []
    for fold in range(5):
        config = DataConfig(name="images", fold=fold)
        part = hold_out(Datasets(split, split, list("abcd")), config).eval
        assert torch.bincount(part.labels).tolist() == [2, 2, 2, 2]  # type: ignore[union-attr]
        seen += part.images.flatten().tolist()  # type: ignore[union-attr]
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["data.fold=5"], "data.fold=5 must be less than data.num_folds=5"),
        (["data.fold=0", "data.num_folds=1"], "data.num_folds=1 must be at least 2"),
        (["data.fold=0", "data.validation_fraction=0.1"], "exclude each other"),
    ],
)
def test_wrong_folds_are_one_error(words: list[str], error: str, tmp_path: Path) -> None:
    done = launch(*TINY, *words, f"output_dir={tmp_path}")
    assert done.code == 2
    assert error in done.output
    assert "Traceback" not in done.output


def test_a_sweep_over_folds_ends_with_mean_and_standard_deviation(tmp_path: Path) -> None:
    words = (*TINY, "epochs=1", "data.num_folds=3", "data.fold=0,1,2", "optimizer.lr=0.1,0.01")
    done = succeed("--multirun", *words, "name=folds", "select_by=eval/loss", cwd=tmp_path)
    runs = list((tmp_path / "outputs/folds").iterdir())
    losses: dict[str, list[float]] = {}
    for run_dir in (path for path in runs if path.is_dir()):
        summary = read_summary(run_dir)
        assert summary["eval/split"] == "validation"
        assert summary["best_value"] == summary["eval/loss"]
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        losses.setdefault(str(config["optimizer"]["lr"]), []).append(summary["eval/loss"])
    assert set(losses) == {"0.1", "0.01"}
    for lr, values in losses.items():
        mean = f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
        line = f"optimizer.lr={lr}: {mean} (mean and standard deviation of 3 jobs over data.fold)"
        assert line in done.output.splitlines()
    assert "best eval/loss" in done.output


def test_labels_of_a_part_are_known() -> None:
    split = Labels(torch.arange(20) % 2)
    config = DataConfig(name="labels", fold=1)
    part = hold_out(Datasets(split, split, ["a", "b"]), config).eval
    labels = per_sample(part, "labels")
    assert labels is not None
    assert labels.sum() == 2
