"""data.sampling: how often an epoch draws each sample."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from processes import launch
from runs import compose, kill_in_training, read_summary, records, train_on
from test_manifest import build, root, rows_of, write_csv
from torch import Tensor

from ddp_trainer.config.errors import USER_ERROR, ConfigError
from ddp_trainer.config.images import Sampling
from ddp_trainer.data.dataset import ImageTensors
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.data.sampling import Draw, build_draw

__all__ = ["root"]  # a fixture


def split_of(labels: list[int]) -> ImageTensors:
    return ImageTensors(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), torch.tensor(labels))


def counts_of(order: Tensor, length: int) -> Tensor:
    return torch.bincount(order, minlength=length)


def is_rounded(counts: Tensor, expected: Tensor) -> bool:
    """Return whether each count is the number before or after the expected one."""
    near = (counts >= (expected - 1e-9).floor()) & (counts <= (expected + 1e-9).ceil())
    return bool(near.all())


@settings(deadline=None, max_examples=200)
@given(
    samples=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), min_size=1, max_size=80),
    seed=st.integers(0, 2**31),
)
def test_a_sample_and_a_class_are_drawn_as_often_as_expected(
    samples: list[tuple[int, int]], seed: int
) -> None:
    labels = torch.tensor([label for label, _ in samples])
    weights = torch.tensor([weight for _, weight in samples]).double()
    if weights.sum() == 0:
        weights += 1
    order = Draw(weights, labels).order(torch.Generator().manual_seed(seed))
    assert len(order) == len(samples)
    expected = weights / weights.sum() * len(samples)
    assert is_rounded(counts_of(order, len(samples)), expected)
    by_class = torch.zeros(5).double().index_add_(0, labels, expected)
    assert is_rounded(counts_of(labels[order], 5), by_class)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [(Sampling.balanced, [50, 50]), (Sampling.sqrt, [75, 25])],
)
def test_classes_get_their_share(sampling: Sampling, expected: list[int]) -> None:
    split = split_of([0] * 90 + [1] * 10)
    draw = build_draw(sampling, split, 2)
    assert draw is not None
    orders = [draw.order(torch.Generator().manual_seed(seed)) for seed in range(20)]
    for order in orders:
        assert counts_of(split.labels[order], 2).tolist() == expected
    drawn = torch.stack([counts_of(order, 100) for order in orders])
    assert drawn[:, 90:].min() >= expected[1] // 10
    assert (drawn[:, :90].sum(0) > 0).all()  # other images of the large class in each epoch


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    draw = build_draw(Sampling.balanced, split_of([0] * 40 + [1] * 8), 2)
    orders = {}
    for world_size in (1, 2, 3):
        shares = [
            GlobalBatchSampler(
                48, global_batch_size=12, rank=rank, world_size=world_size, seed=3, draw=draw
            )
            for rank in range(world_size)
        ]
        for epoch in (0, 1):
            for share in shares:
                share.set_epoch(epoch, 2)
            batches = shares[0].global_batches()[2:]
            mine = [torch.tensor(list(share)).view(2, -1) for share in shares]
            joined = torch.stack(mine, 2).flatten(1)
            assert torch.equal(joined, batches)
            orders.setdefault(epoch, []).append(batches)
    for found in orders.values():
        assert all(torch.equal(found[0], other) for other in found)
    assert not torch.equal(orders[0][0], orders[1][0])


@pytest.mark.fault("SIGKILL of a job with balanced sampling", times=2)
def test_a_balanced_training_is_the_same_at_every_world_size_and_after_kills(
    root: Path, tmp_path: Path
) -> None:
    rows = [row for row in rows_of(root) if row["label"] != "cat" or row["path"].endswith("0.png")]
    write_csv(root / "a.csv", rows)
    words = (
        "model=lenet",
        "data=manifest",
        f"data.file={root}/a.csv",
        f"data.cache_dir={root}/cache",
        "data.image_size=16",
        "data.sampling=balanced",
        "global_batch_size=6",
        "epochs=8",
        "precision=fp32",
        "checkpoint.every_steps=2",
        "resume=auto",
        f"output_dir={root}/runs",
    )
    for size in (1, 2, 3):
        train_on(size, *words, f"name={size}")
    config = compose(*words, "name=killed")
    for size in (2, 3):
        kill_in_training(size, config, root / "runs/killed", after=0)
    train_on(1, *words, "name=killed")
    digests = [
        [record["samples/digest"] for record in records(root / "runs" / name, "samples/digest")]
        for name in ("1", "2", "3", "killed")
    ]
    assert all(found == digests[0] for found in digests)
    assert len(set(digests[0])) == 8
    log = (root / "runs/1/train.log").read_text()
    assert (
        "data.sampling=balanced: an epoch draws cat 5 times of 1 images, dog 6 times of" in log
        or ("an epoch draws cat 6 times of 1 images, dog" in log)
    )
    assert read_summary(root / "runs/killed")["steps"] == 16


def test_weights_of_a_table_are_those_of_the_draws(root: Path) -> None:
    rows: list[dict[str, Any]] = [
        {**row, "weight": 3 if row["label"] == "dog" else 0.5} for row in rows_of(root)
    ]
    split = build(write_csv(root / "a.csv", rows)).train
    draw = build_draw(Sampling.weights, split, 3)
    assert draw is not None
    order = draw.order(torch.Generator().manual_seed(0))
    assert counts_of(draw.classes[order], 3).tolist() == [3, 18, 3]


@pytest.mark.parametrize("weight", ["-1", "nan", "inf", "much", ""])
def test_a_wrong_weight_is_one_line(weight: str, root: Path) -> None:
    rows = [{**row, "weight": "1"} for row in rows_of(root)]
    rows[4]["weight"] = weight
    write_csv(root / "a.csv", rows)
    with pytest.raises(ConfigError, match=f"row 6 has the weight '{weight}', which must be"):
        build(root / "a.csv")


def test_what_sampling_needs_is_one_line(tmp_path: Path) -> None:
    done = launch("data.sampling=weights", "data=digits", "model=lenet", f"output_dir={tmp_path}")
    assert done.code == USER_ERROR, done.output
    assert done.output.startswith("error: data.sampling=weights needs a weight of 0 or more")
