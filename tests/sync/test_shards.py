"""Shards: the same bits at every number of ranks."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from processes import launch, on_ranks
from runs import (
    BATCHNORM,
    TINY,
    compose,
    in_process_group,
    newest_checkpoint,
    read_summary,
    records,
    train,
    train_on,
)
from torch import Tensor

from ddp_trainer.config.errors import USER_ERROR, ConfigError
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.world import World
from ddp_trainer.sync.shards import (
    SumOverRanks,
    children,
    largest_nodes,
    merges,
    push,
    samples_of,
    shards_of,
)

DROPOUT = ("model=torchvision", "model.arch=mobilenet_v3_small", "data.height=32", "data.width=32")
RICH = (
    *TINY,
    "shards=6",
    "data.augment.random_crop_padding=2",
    "data.augment.random_hflip=true",
    "ema.decay=0.9",
    "max_grad_norm=1",
    "log_every_steps=1",
    "checkpoint.every_steps=3",
)


# --- the tree -------------------------------------------------------------------------------------


def gradient(samples: range, size: int) -> Tensor:
    """Return what a shard with these samples of the global batch adds, [size]."""
    parts = []
    for sample in samples:
        numbers = torch.Generator().manual_seed(1000 * size + sample)
        exponents = torch.randint(-12, 12, (size,), generator=numbers)
        parts.append(torch.randn(size, generator=numbers) * 2.0**exponents)
    return torch.stack(parts).mean(0)


def tree_sum(shards: list[range], size: int) -> Tensor:
    """Return the sum of the definition, computed in one process. shards: the samples of each."""
    if len(shards) == 1:
        return gradient(shards[0], size)
    middle = (len(shards) + 1) // 2
    return tree_sum(shards[:middle], size) + tree_sum(shards[middle:], size)


def _sum_over_ranks() -> None:
    """Compare sums over the ranks with `tree_sum`; all ranks draw the same examples."""
    with in_process_group() as world:
        world_size = world.world_size

        @settings(derandomize=True, database=None, deadline=None, max_examples=60)
        @given(
            num_shards=st.integers(world_size, 40),
            samples=st.integers(0, 50),
            size=st.one_of(st.integers(1, 2 * world_size), st.integers(1, 500)),
        )
        def check(num_shards: int, samples: int, size: int) -> None:
            batch = {"num_shards": num_shards, "batch_size": num_shards + samples}
            own = shards_of(world.rank, world_size=world_size, num_shards=num_shards)
            parts = samples_of(own, **batch)
            sums: list[Tensor] = []
            for shard, part in zip(own, parts, strict=True):
                push(sums, gradient(part, size), merges(shard, own, (0, num_shards)))
            assert len(sums) == len(largest_nodes(own, (0, num_shards)))
            running = SumOverRanks(sums, world, num_shards=num_shards)
            running.gather()
            total = running.result()
            expected = tree_sum(samples_of(range(num_shards), **batch), size)
            assert all(world.all_gather_object(total.equal(expected)))  # all ranks go on together

        check()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_sum_over_ranks_is_that_of_the_tree(world_size: int) -> None:
    on_ranks(world_size, _sum_over_ranks)


@pytest.mark.parametrize("num_shards", range(1, 20))
def test_the_shards_of_all_ranks_are_the_batch(num_shards: int) -> None:
    for world_size in range(1, num_shards + 1):
        shards = [
            shards_of(rank, world_size=world_size, num_shards=num_shards)
            for rank in range(world_size)
        ]
        assert [shard for own in shards for shard in own] == list(range(num_shards))
        assert {len(own) for own in shards} <= {
            num_shards // world_size,
            -(-num_shards // world_size),
        }
        for batch_size in (num_shards, num_shards + 3, 4 * num_shards + 1):
            parts = [
                part
                for own in shards
                for part in samples_of(own, num_shards=num_shards, batch_size=batch_size)
            ]
            assert [i for part in parts for i in part] == list(range(batch_size))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_few_sums_exist_at_a_time() -> None:
    sums: list[Tensor] = []
    lengths = []
    for shard in range(64):
        push(sums, torch.ones(1), merges(shard, range(64), (0, 64)))
        lengths.append(len(sums))
    assert [one.item() for one in sums] == [64]
    assert max(lengths) == 6


def test_whole_subtrees_are_sent_as_one() -> None:
    for world_size in (1, 2, 4, 8):
        for rank in range(world_size):
            own = shards_of(rank, world_size=world_size, num_shards=8)
            assert len(largest_nodes(own, (0, 8))) == 1
    assert children((0, 5)) == ((0, 3), (3, 5))


def _bytes_sent(config: Config) -> float:
    """Train; return the bytes that this rank has sent in exchanges, by those of the gradients."""
    sent = 0
    exchange = World.begin_exchange

    def counting(world: World, *, send: Any, receive: Any) -> Any:
        nonlocal sent
        sent += sum(tensor.nbytes for tensor, _ in send)
        return exchange(world, send=send, receive=receive)

    World.begin_exchange = counting  # type: ignore[method-assign]
    steps = json.loads(train(config))["steps"]
    return sent / (steps * 4 * LENET_PARAMETERS)


LENET_PARAMETERS = 52_268
"""For images of 12×12 pixels with one channel."""


@pytest.mark.parametrize(("world_size", "num_shards"), [(2, 2), (2, 12), (4, 4), (4, 12)])
def test_a_rank_sends_as_many_bytes_as_in_a_ring(
    world_size: int, num_shards: int, tmp_path: Path
) -> None:
    config = compose(*TINY, f"shards={num_shards}", f"output_dir={tmp_path}", "epochs=1")
    expected = 2 * (world_size - 1) / world_size
    for ratio in on_ranks(world_size, _bytes_sent, config):
        assert ratio == pytest.approx(expected, rel=0.05)


# --- whole runs -----------------------------------------------------------------------------------


def curves(run_dir: Path) -> str:
    """Return all values in metrics.jsonl that are not measurements of time or memory, as text."""
    tags = ("train/", "eval/", "samples/", "optim/")
    values = [
        {tag: value for tag, value in record.items() if tag.startswith(tags)}
        for record in records(run_dir)
    ]
    return json.dumps([record for record in values if record])  # the start of a launch has none


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ((), (1, 2, 3, 6)),
        ((*BATCHNORM, "on_nonfinite=skip"), (1, 2, 5)),
        ((*DROPOUT, "max_steps=6"), (1, 3)),
        (("data.augment.mixup=0.3", "data.augment.cutmix=1", "optimizer=adamw"), (1, 4)),
        (("global_batch_size=13", "shards=5", "eval_batch_size=16"), (1, 2, 3)),
        (("precision=bf16",), (1, 2)),
        (("precision=fp16", "shards=4"), (1, 3)),
    ],
    ids=["lenet", "batchnorm", "dropout", "mixed", "uneven", "bf16", "fp16"],
)
def test_weights_and_curves_are_the_same_at_every_world_size(
    words: tuple[str, ...], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    for world_size in sizes:
        train_on(world_size, *RICH, *words, f"output_dir={tmp_path}", f"name={world_size}")
    runs = [tmp_path / str(world_size) for world_size in sizes]
    assert len({read_summary(run)["weights_sha256"] for run in runs}) == 1
    assert len({curves(run) for run in runs}) == 1
    first, *others = map(newest_checkpoint, runs)
    for other in others:
        assert other["weights_sha256"] == first["weights_sha256"]
        for part in ("model", "ema", "optimizer"):
            torch.testing.assert_close(other[part], first[part], rtol=0, atol=0)


def test_random_crops_of_files_are_the_same_at_every_world_size(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / f"pictures/class-{number % 3}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (20, 24 + number % 5, 3), np.uint8)).save(path)
    files = (
        "data=imagefolder",
        f"data.root={tmp_path}/pictures",
        f"data.cache_dir={tmp_path}/cache",
        "data.image_size=16",
        "data.validation_fraction=0.2",
    )
    common = ("model=lenet", "shards=6", "global_batch_size=12", "epochs=2", "precision=fp32")
    hashes = [
        train_on(size, *files, *common, f"output_dir={tmp_path}", f"name={size}")["weights_sha256"]
        for size in (1, 2, 3)
    ]
    assert len(set(hashes)) == 1


def test_without_shards_the_bits_differ(tmp_path: Path) -> None:
    for world_size in (1, 3):
        words = (*RICH, "shards=null", *BATCHNORM, f"output_dir={tmp_path}")
        train_on(world_size, *words, f"name={world_size}")
    one, other = (newest_checkpoint(tmp_path / name)["model"] for name in ("1", "3"))
    assert any(not one[name].equal(other[name]) for name in one)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("shards=13",), "shards=13 must be at most global_batch_size=12"),
        (("gradient_accumulation_steps=2",), "exclude each other"),
        (("sync=ring",), "has its own way to sum gradients: use sync=ddp"),
        (("sync.comm_hook=fp16",), "has its own way to sum gradients: use sync=ddp"),
        (("check.every_steps=3",), "compares the gradients of ranks"),
        (("shards=0",), "shards=0 must be greater than 0"),
    ],
)
def test_what_shards_exclude_is_one_error(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(*TINY, "shards=6", *words)


def test_more_ranks_than_shards_are_refused(tmp_path: Path) -> None:
    done = launch(*TINY, "shards=2", f"output_dir={tmp_path}", ranks=3)
    assert done.code == 1
    assert "shards=2 must be at least the number of ranks, 3" in done.output


def test_the_number_of_threads_is_part_of_the_run(tmp_path: Path) -> None:
    common = (*TINY, "shards=4", f"output_dir={tmp_path}", "name=run")
    train_on(1, *common, "max_steps=3")
    done = launch(*common, "num_threads=2", "max_steps=6")
    assert done.code == USER_ERROR
    assert "num_threads=2 must be 1, as in" in done.output


# --- verify ---------------------------------------------------------------------------------------


def verify(*run_dirs: Path) -> Any:
    return launch("verify", *map(str, run_dirs), deadline=60)


@functools.cache
def _two(folder: Path) -> tuple[Path, Path]:
    for world_size in (1, 3):
        train_on(world_size, *RICH, f"output_dir={folder}", f"name={world_size}")
    return folder / "1", folder / "3"


def test_verify_compares_two_runs(tmp_path: Path) -> None:
    one, other = _two(tmp_path)
    same = verify(one, other)
    assert same.code == 0, same.output
    assert same.output.split() == ["checkpoints", "ok", "records", "ok"]

    train_on(1, *RICH, "optimizer.momentum=0.5", f"output_dir={tmp_path}", "name=else")
    different = verify(one, tmp_path / "else")
    assert different.code == 1
    assert "step 2: train/loss is " in different.output or "step 3: train/" in different.output
    assert "differs, in step-000000" in different.output


def test_runs_without_a_common_step_are_refused(tmp_path: Path) -> None:
    for name, steps in (("a", 3), ("b", 5)):
        words = (*TINY, f"max_steps={steps}", f"output_dir={tmp_path}", f"name={name}")
        train_on(1, *words)
    done = verify(tmp_path / "a", tmp_path / "b")
    assert done.code == USER_ERROR
    assert "no checkpoint of the same step" in done.output
