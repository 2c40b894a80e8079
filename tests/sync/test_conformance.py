"""Law 1: whatever the strategy and however many ranks, training is that of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest
import torch
from conftest import TINY, compose, on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from ddp_trainer.config import LeNetConfig
from ddp_trainer.distributed import World, connected
from ddp_trainer.environment import read_environment
from ddp_trainer.models import build_model
from ddp_trainer.sync import GradientSync, averaged_statistics, build_sync

STRATEGIES = [("sync=ddp",)]
"""The overrides that choose each strategy; all of them are held to the same law."""

SHAPE, STEPS, GLOBAL_BATCH_SIZE = (1, 12, 12), 4, 13  # 13 divides by no number of ranks
Parameters = dict[str, np.ndarray]
T = TypeVar("T")


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return build_model(LeNetConfig(), image_shape=SHAPE, num_classes=10)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def global_batches() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        images = torch.randn(GLOBAL_BATCH_SIZE, *SHAPE, generator=random)
        yield images, torch.randint(10, (GLOBAL_BATCH_SIZE,), generator=random)


def parameters_of(model: nn.Module) -> Parameters:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def train_alone() -> Parameters:
    """Train on whole batches with nothing of ours but the model."""
    model = lenet()
    optimizer = sgd(model)
    for images, labels in global_batches():
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return parameters_of(model)


def in_world(overrides: tuple[str, ...], function: Callable[[World], T]) -> T:
    config = compose(*TINY, "num_threads=1", *overrides)
    with connected(config, read_environment()) as world:
        return function(world)


def train_shares(overrides: tuple[str, ...]) -> list[Parameters]:
    """Return the parameters after training whole shares and in microbatches, and what the latter left under no_sync."""
    config = compose(*TINY, *overrides).sync

    def train_both_ways(world: World) -> list[Parameters]:
        whole, _ = train_share(build_sync(config, world), world, num_microbatches=1)
        return [whole, *train_share(build_sync(config, world), world, num_microbatches=3)]

    return in_world(overrides, train_both_ways)


def train_share(sync: GradientSync, world: World, *, num_microbatches: int) -> tuple[Parameters, Parameters]:
    """Train on this rank's share of each batch, as `GradientSync` says a step goes.

    Returns the parameters, and the gradients that the last step's early microbatches left.
    """
    model = lenet()
    replica = sync.wrap(model)
    optimizer = sgd(model)
    local: Parameters = {}
    for images, labels in global_batches():
        mine = slice(world.rank, None, world.world_size)
        parts = (whole[mine].tensor_split(num_microbatches) for whole in (images, labels))
        *early, last = zip(*parts, strict=True)
        with sync.no_sync():
            for part in early:
                backward(replica, part, world)
        local = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
        backward(replica, last, world)
        sync.before_step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sync.after_step()
    return parameters_of(model), local


def backward(replica: nn.Module, part: tuple[Tensor, ...], world: World) -> None:
    images, labels = part
    scale = world.world_size / GLOBAL_BATCH_SIZE
    (cross_entropy(replica(images), labels, reduction="sum") * scale).backward()


@pytest.fixture(scope="module")
def alone() -> Parameters:
    return train_alone()


@pytest.mark.parametrize("overrides", STRATEGIES, ids=" ".join)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_strategy_trains_as_one_process_on_the_whole_batch(
    overrides: tuple[str, ...], ranks: int, alone: Parameters
) -> None:
    answers = on_ranks(ranks, train_shares, overrides)
    for way in ("whole shares", "microbatches"):
        replicas: list[Parameters] = [answer[way == "microbatches"] for answer in answers]
        for name, expected in alone.items():
            for replica in replicas[1:]:
                assert replica[name].tobytes() == replicas[0][name].tobytes(), f"{name} differs between ranks, {way}"
            torch.testing.assert_close(torch.from_numpy(replicas[0][name]), torch.from_numpy(expected))
    gradients = [answer[2] for answer in answers]  # no_sync kept them local: ranks saw different images
    for name, expected in gradients[0].items():
        for other in gradients[1:]:
            assert other[name].tobytes() != expected.tobytes(), f"{name} travelled under no_sync"


# --- statistics -------------------------------------------------------------------------------


def normed(rank: int) -> nn.Module:
    """Return a model whose running statistics are those of rank `rank`."""
    model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 3), nn.BatchNorm2d(2))
    random = torch.Generator().manual_seed(rank)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=random))
        else:
            buffer.fill_(rank)
    return model


def buffers_of(model: nn.Module, moment: str) -> Parameters:
    return {f"{moment} {name}": buffer.numpy().copy() for name, buffer in model.named_buffers()}


def average() -> Parameters:
    def look(world: World) -> Parameters:
        model = normed(world.rank)
        before = buffers_of(model, "before")
        with averaged_statistics(model, world):
            within = buffers_of(model, "within")
        return before | within | buffers_of(model, "after")

    return in_world(("sync=ddp",), look)


@pytest.mark.parametrize("ranks", [1, 3])
def test_statistics_are_averaged_within_the_context_and_a_ranks_own_after_it(ranks: int) -> None:
    answers: list[Parameters] = on_ranks(ranks, average)
    for name, own in normed(0).named_buffers():
        for answer in answers:
            assert answer[f"after {name}"].tobytes() == answer[f"before {name}"].tobytes()
        if own.is_floating_point():
            mean = np.mean([answer[f"before {name}"] for answer in answers], axis=0)
            for answer in answers:
                np.testing.assert_allclose(answer[f"within {name}"], mean, rtol=1e-6)
                assert answer[f"within {name}"].tobytes() == answers[0][f"within {name}"].tobytes()
        else:  # how many batches were seen is the rank's own
            assert [int(answer[f"within {name}"]) for answer in answers] == list(range(ranks))


def average_without_statistics() -> Parameters:
    def look(world: World) -> Parameters:
        model = lenet()
        with averaged_statistics(model, world) as own:
            return {"own": own.numpy()}

    return in_world(("sync=ddp",), look)


def test_a_model_without_statistics_has_nothing_to_average() -> None:
    assert [len(answer["own"]) for answer in on_ranks(2, average_without_statistics)] == [0, 0]
