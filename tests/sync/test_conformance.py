"""Conformance: with every strategy, at every world size, training is that of one process on the
whole batch.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from processes import on_ranks
from runs import cross_entropies, in_process_group, step_settings, world_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from ddp_trainer.config.models import LeNetConfig
from ddp_trainer.config.sync import (
    AllReduceConfig,
    AsyncParameterServerConfig,
    Bucket,
    ChannelParallelConfig,
    DDPConfig,
    FSDPConfig,
    LocalSGDConfig,
    ParameterServerConfig,
    ReplicasConfig,
    RingConfig,
    SyncConfig,
)
from ddp_trainer.distributed.world import World
from ddp_trainer.models import build_model
from ddp_trainer.sync import build_sync
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.sync.buffers import averaged_statistics
from ddp_trainer.sync.parameter_server import assign_owners
from ddp_trainer.sync.replicas import split_batch
from ddp_trainer.sync.ring import ring_all_reduce
from ddp_trainer.training.step import TrainStep

STRATEGIES: dict[str, Callable[[int], SyncConfig]] = {
    "ddp": lambda ranks: DDPConfig(),
    "ddp, buckets of 1 MiB": lambda ranks: DDPConfig(bucket_cap_mb=1),
    "allreduce, flat": lambda ranks: AllReduceConfig(bucket=Bucket.flat),
    "allreduce, parameter": lambda ranks: AllReduceConfig(bucket=Bucket.parameter),
    "ring": lambda ranks: RingConfig(),
    "parameter_server": lambda ranks: ParameterServerConfig(),
    "parameter_server on each rank": lambda ranks: ParameterServerConfig(num_servers=ranks),
    "async_parameter_server": lambda ranks: AsyncParameterServerConfig(max_staleness=0),
    "fsdp": lambda ranks: FSDPConfig(),
    "channel_parallel": lambda ranks: ChannelParallelConfig(),
    "local_sgd": lambda ranks: LocalSGDConfig(every_steps=1),
    "replicas": lambda ranks: ReplicasConfig(devices=["cpu"] * ranks),
}
"""The config of each strategy for so many ranks, or replicas; all of them are held to the same law.
"""

# 13 divides by no number of ranks
SHAPE = (1, 12, 12)
STEPS = 4
GLOBAL_BATCH_SIZE = 13
FROZEN = "0.weight"
WORLD_OF_ONE = world_of()
Parameters = dict[str, np.ndarray]
Case = tuple[str, str]
"""The names of a strategy and of an optimizer."""


def lenet() -> nn.Module:
    torch.manual_seed(0)
    model = build_model(LeNetConfig(), image_shape=SHAPE, num_classes=10)
    dict(model.named_parameters())[FROZEN].requires_grad_(False)
    return model


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True
    ),
    "adamw": lambda model: AdamW(
        model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.01, fused=True
    ),
}
"""With Adam's usual eps, 1e-8, the rounding of a tiny gradient becomes a step of full size."""


def global_batches() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        images = torch.randn(GLOBAL_BATCH_SIZE, *SHAPE, generator=random)
        yield images, torch.randint(10, (GLOBAL_BATCH_SIZE,), generator=random)


def parameters_of(model: nn.Module) -> Parameters:
    whole = model.state_dict()  # of a sharded model, too
    return {name: whole[name].detach().numpy() for name, _ in model.named_parameters()}


@functools.cache
def train_alone(optimizer_name: str) -> Parameters:
    """Train on whole batches with nothing of ours but the model."""
    model = lenet()
    optimizer = OPTIMIZERS[optimizer_name](model)
    for images, labels in global_batches():
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return parameters_of(model)


def train_shares(strategies: dict[str, SyncConfig]) -> dict[Case, list[Parameters]]:
    """Return, for each case, the parameters after training whole shares and in microbatches, and
    local gradients.
    """
    results = {}
    with in_process_group() as world:
        for (name, config), optimizer_name in itertools.product(strategies.items(), OPTIMIZERS):
            whole, _ = train_share(
                build_sync(config, world), world, optimizer_name, accumulation_steps=1
            )
            parts = train_share(
                build_sync(config, world), world, optimizer_name, accumulation_steps=3
            )
            results[name, optimizer_name] = [whole, *parts]
    return results


class RecordingStep(TrainStep):
    """Keeps the gradients that are there before the last microbatch's backward."""

    local: Parameters

    def forward_backward(self, images: Tensor, labels: Tensor) -> Tensor:
        self.local = {
            name: p.grad.numpy().copy()
            for name, p in self.model.named_parameters()
            if p.grad is not None and not isinstance(p.grad, DTensor)
        }
        return super().forward_backward(images, labels)


def train_share(
    sync: GradientSync, world: World, optimizer_name: str, *, accumulation_steps: int
) -> tuple[Parameters, Parameters]:
    """Train on this rank's share of each batch, by the very step that a run uses.

    Returns the parameters, and the gradients before the last step's last microbatch.
    """
    model = lenet()
    optimizer = OPTIMIZERS[optimizer_name](model)
    settings = step_settings(
        global_batch_size=GLOBAL_BATCH_SIZE, gradient_accumulation_steps=accumulation_steps
    )
    step = RecordingStep(
        model,
        sync,
        optimizer,
        lambda step: 1.0,
        loss=cross_entropies,
        settings=settings,
        world=world,
    )
    model.train()
    for images, labels in global_batches():
        share = slice(world.rank, None, world.world_size)
        step(images[share], labels[share])
    return parameters_of(model), step.local


@functools.cache
def together(processes: int, replicas: int) -> list[dict[Case, list[Parameters]]]:
    """Return the results of the strategies that run in so many processes, by rank; `replicas`:
    those of one process.
    """
    configs = {name: config(replicas) for name, config in STRATEGIES.items()}
    in_one = processes < replicas
    chosen = {
        name: config
        for name, config in configs.items()
        if replicas == 1 or config.single_process == in_one
    }
    return on_ranks(processes, train_shares, chosen, deadline=120)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_strategy_trains_as_one_process_on_the_whole_batch(
    strategy: str, ranks: int, optimizer_name: str
) -> None:
    if strategy == "local_sgd" and optimizer_name == "adamw":
        return  # the mean of Adam's updates is not the update of the mean
    processes = 1 if strategy == "replicas" else ranks
    answers = [found[strategy, optimizer_name] for found in together(processes, ranks)]
    for way in ("whole shares", "microbatches"):
        replicas: list[Parameters] = [answer[way == "microbatches"] for answer in answers]
        for name, expected in train_alone(optimizer_name).items():
            for replica in replicas[1:]:
                assert replica[name].tobytes() == replicas[0][name].tobytes(), (
                    f"{name} differs between ranks, {way}"
                )
            torch.testing.assert_close(
                torch.from_numpy(replicas[0][name]), torch.from_numpy(expected)
            )
        assert replicas[0][FROZEN].tobytes() == train_alone(optimizer_name)[FROZEN].tobytes()
    # no_sync kept them local: ranks saw different images
    gradients = [answer[2] for answer in answers]
    for name, expected in gradients[0].items():
        for other in gradients[1:]:
            assert other[name].tobytes() != expected.tobytes(), f"{name} travelled under no_sync"


# --- the ring, whatever its length --------------------------------------------------------------


def ring_sums(lengths: tuple[int, ...]) -> list[bytes]:
    sums = []
    with in_process_group() as world:
        for length in lengths:
            vector = torch.arange(length, dtype=torch.float32) + 10.0**world.rank
            ring_all_reduce(vector, world)
            sums.append(vector.numpy().tobytes())
    return sums


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_adds_up_vectors_of_any_length(ranks: int) -> None:
    lengths = (0, 1, 2, 3, 5, 7, 64, 1001)
    for length, *sums in zip(lengths, *on_ranks(ranks, ring_sums, lengths), strict=True):
        expected = ranks * torch.arange(length, dtype=torch.float32) + sum(
            10.0**rank for rank in range(ranks)
        )
        assert len(set(sums)) == 1
        np.testing.assert_allclose(
            np.frombuffer(sums[0], dtype=np.float32), expected.numpy(), rtol=1e-6
        )


def test_keys_are_balanced_over_their_owners_by_size() -> None:
    sizes = {"a": 100, "b": 60, "c": 50, "d": 40, "e": 5, "f": 5}
    owners = assign_owners(sizes, num_servers=3)
    loads = [sum(size for key, size in sizes.items() if owners[key] == owner) for owner in range(3)]
    assert loads == [100, 70, 90]


def test_a_batch_smaller_than_the_number_of_replicas_is_split_as_far_as_it_goes() -> None:
    parts = split_batch(torch.arange(2.0)[:, None], [torch.device("cpu")] * 3)
    assert [part.tolist() for part in parts] == [[[0.0]], [[1.0]]]


# --- statistics -------------------------------------------------------------------------------


def normed(rank: int) -> nn.Module:
    """Return a model whose running statistics are those of rank `rank`."""
    model = nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 3), nn.BatchNorm2d(2)
    )
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
    with in_process_group() as world:
        model = normed(world.rank)
        before = buffers_of(model, "before")
        with averaged_statistics(model, world):
            within = buffers_of(model, "within")
        return before | within | buffers_of(model, "after")


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
