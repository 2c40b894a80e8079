"""Silent corruption: a flipped bit is found before its step is used, and the rank is named; no
false alarm.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import on_ranks
from runs import cross_entropies, in_process_group, step_settings
from torch import Tensor, nn

from ddp_trainer.config.models import LeNetConfig
from ddp_trainer.config.schema import Precision
from ddp_trainer.config.sync import (
    AllReduceConfig,
    CommHook,
    DDPConfig,
    LocalSGDConfig,
    ParameterServerConfig,
    RingConfig,
    SyncConfig,
)
from ddp_trainer.distributed.world import World
from ddp_trainer.models.lenet import LeNet
from ddp_trainer.observers.gradient_check import CorruptionError, GradientCheck, pass_on
from ddp_trainer.start import autocast_dtype
from ddp_trainer.sync import build_sync
from ddp_trainer.training.step import TrainStep

NUM_TRIALS = 6
DDP = DDPConfig()
# which no number of ranks divides
BATCH = 13
SHAPE = (1, 12, 12)


def build(
    world: World, config: SyncConfig = DDP, *, precision: Precision = Precision.fp32, parts: int = 1
) -> TrainStep:
    torch.manual_seed(0)
    model = LeNet(LeNetConfig(), image_shape=SHAPE, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = step_settings(
        global_batch_size=BATCH,
        gradient_accumulation_steps=parts,
        autocast_dtype=autocast_dtype(precision),
    )
    sync = build_sync(config, world)
    step = TrainStep(
        model,
        sync,
        optimizer,
        lambda step: 1.0,
        loss=cross_entropies,
        settings=settings,
        world=world,
    )
    step.hooks.append(GradientCheck(step, every_steps=1, deterministic=False))
    step.sync.begin()
    step.begin_training()
    return step


def check_of(step: TrainStep) -> GradientCheck:
    [check] = step.hooks
    assert isinstance(check, GradientCheck)
    return check


def train(step: TrainStep, count: int, seed: int = 0) -> None:
    """Take so many steps on this rank's shares of random batches."""
    generator = torch.Generator().manual_seed(seed)
    share = slice(step.world.rank, None, step.world.world_size)
    for _ in range(count):
        images = torch.randn(BATCH, *SHAPE, generator=generator)
        labels = torch.randint(10, (BATCH,), generator=generator)
        step(images[share].contiguous(memory_format=torch.channels_last), labels[share])


def flip(tensor: Tensor, place: int, bit: int) -> Tensor:
    """Return a copy of `tensor` with one bit of one element flipped."""
    changed = tensor.detach().clone(memory_format=torch.contiguous_format)
    changed.view(-1).view(torch.int32)[place % tensor.numel()] ^= 1 << bit if bit < 31 else -(2**31)
    return changed


def corrupt(step: TrainStep, what: str, trial: int) -> Callable[[], object]:
    """Flip a bit in the next step. Return what ends it."""
    parameters = list(step.model.parameters())
    parameter = parameters[trial % len(parameters)]
    place = 7 * trial
    bit = (5 * trial) % 32
    match what:
        case "gradient":
            return parameter.register_hook(lambda gradient: flip(gradient, place, bit)).remove
        case "accumulated gradient":

            def change(parameter: Tensor) -> None:
                assert parameter.grad is not None
                parameter.grad.copy_(flip(parameter.grad, place, bit))

            return parameter.register_post_accumulate_grad_hook(change).remove
        case "activation":
            first = next(module for module in step.model.modules() if isinstance(module, nn.Conv2d))
            # Of the largest value, or pooling would drop it and nothing would have happened.
            return first.register_forward_hook(
                lambda _module, _inputs, output: (
                    output + (flip(output, int(output.argmax()), 22) - output).detach()
                )
            ).remove
        case _:
            with torch.no_grad():
                parameter.copy_(flip(parameter, place, bit))
            return lambda: None


def trials(what: str, numbers: range, precision: Precision) -> list[tuple[int, int | None, int]]:
    """Return for each trial the corrupted rank, the named one (-1 if none was found), and the
    number of good steps.
    """
    found = []
    with in_process_group() as world:
        for trial in numbers:
            step = build(world, precision=precision)
            rank = trial % world.world_size
            train(step, 2)
            undo = corrupt(step, what, trial) if world.rank == rank else lambda: None
            try:
                train(step, 1, seed=trial)
                found.append((rank, -1, step.count))
            except CorruptionError as error:
                found.append((rank, error.rank, step.count))
            undo()
    return found


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        ("gradient", 3),
        ("accumulated gradient", 3),
        ("activation", 3),
        ("parameter", 3),
        ("activation", 4),
    ],
)
def test_a_flipped_bit_is_found_before_it_is_used_and_its_rank_is_named(
    what: str, ranks: int
) -> None:
    results = on_ranks(ranks, trials, what, range(NUM_TRIALS), Precision.fp32, deadline=240)
    assert results == [results[0]] * ranks
    assert [(named, count) for _, named, count in results[0]] == [
        (rank, 2) for rank, _, _ in results[0]
    ]


@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_two_ranks_find_it_and_name_the_one_that_is_not_repeatable(what: str) -> None:
    results = on_ranks(2, trials, what, range(4), Precision.bf16, deadline=120)
    named = Counter(named for _, named, _ in results[0])
    assert set(named) == {None} if what == "parameter" else -1 not in named


def checked_steps(step: TrainStep) -> list[int]:
    """Return a list to which the number of each step that is checked will be appended."""
    steps: list[int] = []
    check = check_of(step)
    recompute = check.recompute

    def counted(images: Tensor, labels: Tensor, *, shift: int) -> Tensor:
        steps.append(step.count + 1)
        return recompute(images, labels, shift=shift)

    check.recompute = counted  # type: ignore[method-assign]
    return steps


def quiet_steps(count: int, sync: SyncConfig, precision: Precision, parts: int) -> list[int]:
    """Return the steps that were checked."""
    with in_process_group() as world:
        step = build(world, sync, precision=precision, parts=parts)
        steps = checked_steps(step)
        train(step, count)
        return steps


STRATEGIES: list[tuple[Any, ...]] = [
    (2, DDP, Precision.fp32, 1),
    (3, DDP, Precision.fp32, 2),
    (2, DDP, Precision.bf16, 1),
    (1, DDP, Precision.fp32, 1),
    (3, AllReduceConfig(), Precision.fp32, 1),
    (2, RingConfig(), Precision.fp32, 2),
    (3, ParameterServerConfig(), Precision.fp32, 1),
    (2, DDPConfig(comm_hook=CommHook.fp16), Precision.fp32, 1),
]


@pytest.mark.parametrize(("ranks", "sync", "precision", "parts"), STRATEGIES)
def test_quiet_steps_raise_no_alarm_with_any_strategy(
    ranks: int, sync: SyncConfig, precision: Precision, parts: int
) -> None:
    steps = on_ranks(ranks, quiet_steps, 30, sync, precision, parts, deadline=120)
    assert steps == [list(range(1, 31))] * ranks


def on_unequal_machines(precision: Precision, what: str) -> tuple[bool, int, int | None]:
    """Return whether gradients may differ by rounding, the number of good steps, and the rank that
    was named.
    """
    with in_process_group() as world:
        torch.set_num_threads(1 + world.rank)
        step = build(world, precision=precision)
        train(step, 30)
        if world.rank == 2:
            parameter = list(step.model.parameters())[-2]
            if what == "gradient":
                parameter.register_hook(
                    lambda gradient: flip(gradient, int(gradient.abs().argmax()), 30)
                )
            else:
                with torch.no_grad():
                    parameter.copy_(flip(parameter, 7, 0))
        try:
            train(step, 1)
        except CorruptionError as error:
            return check_of(step).tolerance is not None, step.count, error.rank
        return check_of(step).tolerance is not None, step.count, -1


@pytest.mark.parametrize(
    ("precision", "what"), [(Precision.fp32, "parameter"), (Precision.bf16, "gradient")]
)
def test_machines_that_round_differently_are_compared_within_a_bound(
    precision: Precision, what: str
) -> None:
    assert on_ranks(3, on_unequal_machines, precision, what, deadline=120) == [(True, 30, 2)] * 3


def overflowing_steps() -> tuple[bool, int]:
    """Return whether gradients of fp16 overflowed, and how many steps were checked, on machines
    that round apart.
    """
    with in_process_group() as world:
        torch.set_num_threads(1 + world.rank)
        step = build(world, precision=Precision.fp16)
        step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        steps = checked_steps(step)
        train(step, 12)
        assert check_of(step).tolerance is not None
        return step.scaler.get_scale() < 2**30, len(steps)


def test_gradients_that_overflow_on_all_ranks_are_no_corruption() -> None:
    assert on_ranks(2, overflowing_steps) == [(True, 12)] * 2


def test_steps_apart_are_not_compared() -> None:
    steps = on_ranks(2, quiet_steps, 10, LocalSGDConfig(every_steps=4), Precision.fp32, 1)
    assert steps == [[1, 5, 9]] * 2


def check_after_resume() -> tuple[list[bool], list[bool]]:
    """Return whether a check is due after some steps of a resumed run, and whether batches arrive
    in their layout.
    """
    with in_process_group() as world:
        step = build(world)
        check_of(step).every_steps = 100
        step.load_state_dict(step.state_dict() | {"step": 150})
        due = []
        for step.count in (150, 198, 199):
            due.append(check_of(step).is_due())
        batch = torch.zeros(2, 1, 4, 5)  # of one channel: contiguous in both layouts
        batches = [batch, batch.to(memory_format=torch.channels_last)]
        other = 1 - world.rank
        received = [pass_on(batch, 2, world, source=other, target=other) for batch in batches]
        return due, [
            one.stride() == other.stride() for one, other in zip(batches, received, strict=True)
        ]


def test_a_resumed_run_is_checked_at_the_same_steps_in_the_same_layout() -> None:
    assert on_ranks(2, check_after_resume) == [([False, False, True], [True, True])] * 2


def with_check(enabled: bool) -> list[float]:
    with in_process_group() as world:
        step = build(world)
        if not enabled:
            step.hooks.clear()
        train(step, 5)
        return torch.cat(
            [parameter.detach().view(-1) for parameter in step.model.parameters()]
        ).tolist()


def test_the_check_does_not_change_the_training() -> None:
    assert on_ranks(3, with_check, True) == on_ranks(3, with_check, False)
