"""The phases of a step: they add up to it, and communication is the part that does not overlap with
backward.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from processes import on_ranks
from runs import TINY, compose, newest_checkpoint, records
from torch import nn

from ddp_trainer import registry
from ddp_trainer.config.models import LeNetConfig, ModelConfig
from ddp_trainer.models import build_model
from ddp_trainer.observers.step_times import StepTimer
from ddp_trainer.training.loop import in_data_phase
from ddp_trainer.training.phase import TAGS, Phase
from ddp_trainer.training_run import run

CPU = torch.device("cpu")
NAP = 0.02


def slow_batches(count: int, seconds: float) -> Iterator[int]:
    for batch in range(count):
        time.sleep(seconds)
        yield batch


def test_phases_are_timed_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    nap = time.sleep
    naps: list[float] = []
    """The seconds of each sleep, which are more than asked for on a busy machine."""

    def timed_nap(seconds: float) -> None:
        begin = time.perf_counter()
        nap(seconds)
        naps.append(time.perf_counter() - begin)

    monkeypatch.setattr(time, "sleep", timed_nap)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model(torch.ones(2, 3)).sum().backward()  # the first backward of a process starts threads
    timer = StepTimer(CPU, model)
    for _ in in_data_phase(slow_batches(3, NAP), timer.enter):
        timer.enter(Phase.backward)
        time.sleep(2 * NAP)
        model(torch.ones(2, 3)).sum().backward()
        time.sleep(NAP)  # the gradients are ready: a strategy that overlaps waits here
        timer.enter(Phase.gradient_sync)
        time.sleep(NAP)
        timer.enter(Phase.optimizer)
        time.sleep(3 * NAP)
        timer.enter(Phase.between_steps)
    tags = timer.close_window(images=300)
    for name, count, places in (
        ("data_wait", 1, (0,)),
        ("forward_backward", 2, (1,)),
        ("communication", 2, (2, 3)),
        ("optimizer", 3, (4,)),
    ):
        assert tags[f"time/{name}_ms"] >= 1e3 * count * NAP
        slept = sum(sum(naps[place::5]) for place in places)
        assert tags[f"time/{name}_fraction"] == pytest.approx(slept / sum(naps), abs=0.06)
    assert sum(tags[f"time/{name}_ms"] for name in TAGS) == pytest.approx(
        tags["time/step_ms"], rel=0.02
    )
    assert tags["throughput/images_per_second"] == pytest.approx(100 / (tags["time/step_ms"] / 1e3))


@pytest.mark.parametrize(("is_frozen", "passes"), [(False, 1), (False, 3), (True, 1)])
def test_communication_begins_with_the_last_gradient_of_the_last_backward(
    is_frozen: bool, passes: int
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(not is_frozen)  # the next layer's gradient is then the last
    timer = StepTimer(CPU, model)
    timer.steps = 1
    timer.enter(Phase.backward)
    for _ in range(passes):
        model(torch.ones(2, 3)).sum().backward()
        time.sleep(NAP)
    timer.enter(Phase.gradient_sync)
    tags = timer.close_window(images=1)
    assert tags["time/forward_backward_ms"] >= 1e3 * (passes - 1) * NAP
    assert 1e3 * NAP <= tags["time/communication_ms"] < 2e3 * NAP


def test_each_window_begins_anew_and_the_rate_is_the_median() -> None:
    timer = StepTimer(CPU, nn.Linear(1, 1))
    assert timer.median_rate() is None
    for seconds in (0.0, 0.001, 0.05):
        assert list(in_data_phase(slow_batches(2, seconds), timer.enter)) == [0, 1]
        tags = timer.close_window(images=20)
        assert tags["time/step_ms"] >= 1e3 * seconds
        assert timer.steps == 0
    assert timer.median_rate() == sorted(timer.rates)[1]


@pytest.mark.parametrize("sync", ["sync=ddp", "sync=allreduce"])
def test_a_run_logs_the_phases_of_its_steps(sync: str, train_in: Callable[..., Path]) -> None:
    assert_phases_add_up(train_in("run", *TINY, sync, "log_every_steps=4", "max_steps=8", ranks=2))


def assert_phases_add_up(run_dir: Path) -> None:
    logged = records(run_dir, "time/step_ms")
    assert len(logged) == 2
    for record in logged:
        phases = {name: record[f"time/{name}_ms"] for name in TAGS}
        assert sum(phases.values()) == pytest.approx(record["time/step_ms"])
        assert all(
            phases[name] > 0
            for name in ("data_wait", "forward_backward", "communication", "optimizer")
        )


@dataclass(kw_only=True, slots=True)
class PartlyFrozenConfig(ModelConfig):
    name: str = "partly_frozen"
    has_unused: bool = False


def build_partly_frozen(
    config: PartlyFrozenConfig, *, image_shape: tuple[int, int, int], num_classes: int
) -> nn.Module:
    """Return LeNet with a frozen first layer, and possibly a parameter before it that forward does
    not use.
    """
    model = build_model(LeNetConfig(), image_shape=image_shape, num_classes=num_classes)
    next(model.children()).requires_grad_(False)
    if config.has_unused:
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model


def train_partly_frozen(sync: str, has_unused: bool, folder: str) -> None:
    registry.register("model", "partly_frozen", PartlyFrozenConfig, build_partly_frozen)
    words = (*TINY, sync, f"output_dir={folder}", "name=run", "log_every_steps=4", "max_steps=8")
    run(replace(compose(*words), model=PartlyFrozenConfig(has_unused=has_unused)))


@pytest.mark.parametrize(
    ("sync", "has_unused"),
    [
        ("sync=ddp", False),
        ("sync=allreduce", True),
        ("sync=parameter_server", True),
        ("sync=local_sgd", True),
    ],
)
def test_a_model_with_a_frozen_first_layer_trains(
    sync: str, has_unused: bool, tmp_path: Path
) -> None:
    """A parameter without a gradient is refused by DDP, and left as it is by the other
    strategies.
    """
    on_ranks(2, train_partly_frozen, sync, has_unused, str(tmp_path))
    assert_phases_add_up(tmp_path / "run")
    state = newest_checkpoint(tmp_path / "run")["model"]
    assert ("unused" in state) == has_unused
    if has_unused:
        assert torch.equal(state["unused"], torch.ones(3))
