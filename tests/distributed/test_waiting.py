"""The mark that a rank waits for other ranks: set while it waits in a collective or in DDP."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from processes import on_ranks
from torch import nn

from ddp_trainer.config.schema import Backend, Device
from ddp_trainer.config.sync import DDPConfig
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.process_group import process_group
from ddp_trainer.distributed.world import World, is_waiting, waiting
from ddp_trainer.sync.ddp import DDPSync


def late(world: World) -> None:
    """Let rank 0 be first."""
    time.sleep(world.rank * 1.0)


def reduce(world: World) -> Callable[[], object]:
    late(world)
    return lambda: world.all_reduce(torch.ones(3))


def gather(world: World) -> Callable[[], object]:
    late(world)
    return lambda: world.all_gather_object({"rank": world.rank})


def send(world: World) -> Callable[[], object]:
    received = torch.empty(3)
    late(world)
    other = 1 - world.rank
    return lambda: world.exchange(send=[(torch.ones(3), other)], receive=[(received, other)])


def backward(world: World) -> Callable[[], object]:
    model = DDPSync(DDPConfig(), world).wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    for _ in range(2):  # DDP agrees on new buckets in the second forward pass
        model(torch.ones(2, 3)).sum().backward()
    late(world)
    return lambda: model(torch.ones(2, 3)).sum().backward()


def watch(prepare: Callable[[World], Callable[[], object]]) -> tuple[bool, bool, bool]:
    """Return whether the mark was set before, in the middle of and after a rank's collective."""
    with process_group(
        read_environment(),
        device=Device.cpu,
        backend=Backend.gloo,
        num_threads=1,
        timeout_seconds=60,
    ) as world:
        collective = prepare(world)
        before = is_waiting()
        marks: list[bool] = []
        timer = threading.Timer(0.5, lambda: marks.append(is_waiting()))
        timer.start()
        collective()
        after = is_waiting()
        timer.join()
        return before, marks[0], after


@pytest.mark.parametrize("prepare", [reduce, gather, send, backward])
def test_a_rank_is_marked_while_it_waits_for_another_one(
    prepare: Callable[[World], Callable[[], object]],
) -> None:
    first, last = on_ranks(2, watch, prepare)
    assert first == (False, True, False)
    assert last == (False, False, False)


def test_the_mark_of_an_outer_wait_outlives_an_inner_one_and_errors() -> None:
    with suppress(RuntimeError), waiting():
        with waiting():
            pass
        assert is_waiting()
        raise RuntimeError
    assert not is_waiting()
