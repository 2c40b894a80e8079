"""The pipeline: where models are cut, and that training through stages is that of one process with
the same microbatches.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from processes import on_ranks
from runs import cross_entropies, in_process_group, step_settings, world_of
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torchvision.models import VisionTransformer, mobilenet_v3_small, resnet18

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.sync import PipelineConfig, Schedule
from ddp_trainer.distributed.world import World, is_waiting
from ddp_trainer.pipeline_step import PipelineStep
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.sync.pipeline import PipelineSync, balanced, cut
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.step import TrainStep

SHAPE = (2, 6, 6)
CPU = torch.device("cpu")
GLOBAL_BATCH_SIZE = 24
State = dict[str, np.ndarray]


class Block(nn.Module):
    """A residual block with BatchNorm, which changes its input in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, features: Tensor) -> Tensor:
        features = self.act(features)
        return features + self.norm(self.conv(features))


class Odd(nn.Module):
    """A model with frozen first layers, a tied one, a parameter without a layer, and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.first.requires_grad_(False)
        self.blocks = nn.Sequential(Block(6), Block(6), Block(6))
        self.scale = nn.Parameter(torch.ones(6, 1, 1))
        self.one = nn.Linear(54, 54)
        self.same = nn.Linear(54, 54)
        self.same.weight = self.one.weight
        self.last = nn.Linear(54, 5)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.first(images).tanh()) * self.scale
        features = nn.functional.max_pool2d(features, 2).flatten(1)
        return self.last(self.same(self.one(features).tanh()).tanh())


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01, eps=1e-3, fused=True),
}


CASES = {2: [(2, 1, 0), (2, 3, 2)], 3: [(3, 2, 1)], 4: [(4, 1, 0), (2, 2, 0)]}
"""The numbers of stages, of microbatches of a rank, and of frozen blocks, by the number of ranks;
two frozen blocks are a whole stage.
"""
Case = tuple[str, int, int, int, str]
"""A schedule, a member of `CASES`, and an optimizer."""


def take_all(cases: list[Case]) -> list[State]:
    with in_process_group() as world:
        return [
            train(
                PipelineSync(
                    PipelineConfig(num_stages=num_stages, schedule=Schedule[schedule]), world
                ),
                functools.partial(PipelineStep, image_shape=SHAPE),
                optimizer_name,
                parts=parts,
                frozen=frozen,
                rows=torch.arange(GLOBAL_BATCH_SIZE)[world.rank :: world.world_size],
            )
            for schedule, num_stages, parts, frozen, optimizer_name in cases
        ]


def train_alone(ranks: int, parts: int, frozen: int, optimizer_name: str) -> State:
    """Train in one process, whose microbatches are those of so many ranks."""
    rows = torch.arange(GLOBAL_BATCH_SIZE)
    return train(
        GradientSync(None, world_of()),
        TrainStep,
        optimizer_name,
        parts=ranks * parts,
        frozen=frozen,
        rows=torch.cat([rows[rank::ranks] for rank in range(ranks)]),
    )


def train(
    sync: GradientSync,
    kind: Callable[..., TrainStep],
    optimizer_name: str,
    *,
    parts: int,
    frozen: int,
    rows: Tensor,
) -> State:
    """Return the whole state of model, averages and optimizer, after steps on `rows` of batches."""
    torch.manual_seed(0)
    model = Odd().to(memory_format=torch.channels_last)
    model.blocks[:frozen].requires_grad_(False)
    optimizer = OPTIMIZERS[optimizer_name](model)
    settings = step_settings(
        global_batch_size=GLOBAL_BATCH_SIZE,
        gradient_accumulation_steps=parts,
        ema_decay=0.5,
        max_grad_norm=0.5,
    )
    step = kind(
        model,
        sync,
        optimizer,
        lambda step: 1.0,
        loss=cross_entropies,
        settings=settings,
        world=sync.world,
    )
    step.begin_training()
    random = torch.Generator().manual_seed(1)
    losses = torch.zeros(())
    for _ in range(3):
        images = torch.randn(GLOBAL_BATCH_SIZE, *SHAPE, generator=random)
        images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(5, (GLOBAL_BATCH_SIZE,), generator=random)
        losses += step(images[rows], labels[rows])
    state = {"loss": sync.world.all_reduce(losses), "sums": sync.world.all_reduce(step.own_sums)}
    for index, values in step.state_dict()["optimizer"]["state"].items():
        state |= {f"optimizer {index} {key}": value for key, value in values.items()}
    for place, one in enumerate(step.models):
        state |= {f"{place} {name}": value for name, value in one.state_dict().items()}
    with sync.whole(model), torch.no_grad():
        state["logits running"] = model.eval()(torch.ones(2, *SHAPE))
    return {key: value.detach().numpy().copy() for key, value in state.items()}


@pytest.mark.parametrize("ranks", CASES)
def test_stages_train_as_one_process_with_the_same_microbatches(ranks: int) -> None:
    cases = [(*case, name) for case in CASES[ranks] for name in OPTIMIZERS]
    both: list[Case] = [(kind, *case) for case in cases for kind in ("gpipe", "1f1b")]
    answers: list[list[State]] = on_ranks(ranks, take_all, both)
    for place, (num_stages, parts, frozen, name) in enumerate(cases):
        expected = train_alone(ranks, parts, frozen, name)
        for rank in range(ranks):
            one, other = answers[rank][2 * place : 2 * place + 2]
            of_pipeline = answers[rank - rank % num_stages][2 * place]
            first = answers[0][2 * place]
            assert one.keys() == expected.keys()
            for key, values in one.items():
                assert other[key].tobytes() == values.tobytes(), f"{key} depends on the schedule"
                assert of_pipeline[key].tobytes() == values.tobytes(), f"{key} differs by rank"
                # each pipeline has the statistics of its own microbatches
                if ranks == num_stages or not ("running" in key or "tracked" in key):
                    np.testing.assert_allclose(
                        values, expected[key], rtol=1e-5, atol=1e-6, err_msg=key
                    )
                    assert first[key].tobytes() == values.tobytes(), f"{key} differs by rank"


class Watching(nn.Module):
    """A model that records whether its rank counts as waiting while a layer computes."""

    seen: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(72, 9), nn.Tanh(), nn.Linear(9, 5))
        for layer in self.layers[1::2]:
            layer.register_forward_hook(lambda *_: self.seen.append(is_waiting()))
            layer.register_full_backward_hook(lambda *_: self.seen.append(is_waiting()))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def primed(model: nn.Module, world: World) -> PipelineStep:
    """Return a step of a pipeline of two ranks, after the first passes."""
    step = PipelineStep(
        model,
        PipelineSync(PipelineConfig(), world),
        SGD(model.parameters()),
        lambda step: 1.0,
        loss=cross_entropies,
        settings=step_settings(global_batch_size=8, gradient_accumulation_steps=2),
        world=world,
        image_shape=SHAPE,
    )
    step.prime_ddp(torch.ones(2, *SHAPE))
    return step


def watch() -> tuple[list[bool], list[Phase]]:
    phases: list[Phase] = []
    with in_process_group() as world:
        step = primed(Watching(), world)
        Watching.seen.clear()
        step.on_phase = phases.append
        step(torch.randn(4, *SHAPE), torch.arange(4))
        assert not is_waiting()
    return Watching.seen, phases


def test_a_rank_waits_for_others_only_between_its_passes() -> None:
    for seen, phases in on_ranks(2, watch):
        assert seen == [False] * 8  # one layer, four microbatches, forward and backward
        assert phases.count(Phase.backward) == 4
        for phase, following in itertools.pairwise(phases):
            assert phase is not Phase.backward or following is Phase.gradient_sync


# --- where a model is cut -----------------------------------------------------------------------


def small_vit() -> nn.Module:
    return VisionTransformer(32, 8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": resnet18,
    "mobilenet": functools.partial(mobilenet_v3_small, dropout=0.0),
    "vit": small_vit,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_together_are_the_model_and_have_about_the_same_work(
    name: str, num_stages: int
) -> None:
    model = MODELS[name]()
    stages, owners, flops = cut(model, (3, 32, 32), num_stages=num_stages, device=CPU)
    images = values = torch.randn(2, 3, 32, 32)
    for stage in stages:
        values = stage(values)
    torch.testing.assert_close(values, model(images))

    owned: list[set[int]] = [set(), *(set() for _ in stages[1:])]
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owned[owners[key]].add(id(tensor))
    for stage, own in zip(stages, owned, strict=True):
        used = {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
        assert used == own
        assert own
    assert flops == [flops_of(stage, images, stages[:k]) for k, stage in enumerate(stages)]
    assert max(flops) < 1.5 * sum(flops) / num_stages, flops


def flops_of(stage: nn.Module, images: Tensor, before: list[Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad():
        for part in before:
            images = part(images)
        with FlopCounterMode(display=False) as counter:
            stage(images)
    return counter.get_total_flops()


def test_the_largest_part_is_as_small_as_can_be() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        costs = random.integers(0, 9, size=7).tolist()
        for num_parts in (1, 2, 3, 7):
            ends = balanced(costs, num_parts)
            assert len(ends) == num_parts
            assert ends == sorted(set(ends))
            assert ends[-1] == 7
            largest = max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends]))
            assert largest == min(
                max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, 7]))
                for cuts in itertools.combinations(range(1, 7), num_parts - 1)
            )


class Branching(nn.Module):
    """A model whose operations depend on the values of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(72, 5)
        self.two = nn.Linear(5, 5)

    def forward(self, images: Tensor) -> Tensor:
        features = self.one(images.flatten(1))
        return self.two(features) if features.sum() > 0 else features


class Counting(Branching):
    """A model whose operations depend on the number of calls."""

    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return self.two(self.one(images.flatten(1)) * self.calls)


class Scalar(Branching):
    """A model with a parameter that has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.two(self.one(images.flatten(1))) * self.scale


class Skipping(Branching):
    """A model that uses its images twice, so that it has no place for a cut."""

    def forward(self, images: Tensor) -> Tensor:
        images = images.flatten(1)
        return self.two(self.one(images)) + images[:, :5]


def error_of(kind: type[nn.Module]) -> str:
    with in_process_group() as world, pytest.raises(ConfigError) as caught:
        primed(kind(), world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Branching, "the model, because torch.fx cannot trace it (symbolically traced variables"),
        (Counting, "the model, because its parts do not compute the same logits"),
        (Scalar, "the model, because its parameter scale has no dimension: "),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(kind: type[nn.Module], message: str) -> None:
    for error in on_ranks(2, error_of, kind):
        assert error.startswith(f"sync=pipeline cannot cut {message}")
        assert error.endswith("use sync=ddp")


def test_a_model_without_places_for_cuts_is_refused() -> None:
    for error in on_ranks(2, error_of, Skipping):
        assert error == (
            "sync.num_stages=2 must be at most 1, because the model can be cut at 0 places only:"
            " lower it, or use sync=ddp"
        )


def test_a_world_of_no_whole_pipelines_is_refused() -> None:
    assert world_of().world_size == 1
    with pytest.raises(ConfigError, match="needs a multiple of 3 ranks, not 4: start 6 ranks, or"):
        PipelineConfig(num_stages=3).check_world_size(4)
