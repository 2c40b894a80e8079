"""The timeline of a step: phases add up to it, and communication is what overlap did not hide."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from conftest import TINY, records, train_on
from torch import nn

from ddp_trainer.timeline import PHASES, Timeline

CPU = torch.device("cpu")
NAP = 0.02


def timeline() -> Timeline:
    return Timeline(CPU, nn.Linear(1, 1))


def slow_batches(count: int, seconds: float) -> Iterator[int]:
    for batch in range(count):
        time.sleep(seconds)
        yield batch


def test_it_tells_the_phases_apart() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    watch = Timeline(CPU, model)
    for _ in watch.timed(slow_batches(3, NAP)):
        watch.enter("forward/backward")
        time.sleep(2 * NAP)
        model(torch.ones(2, 3)).sum().backward()
        time.sleep(NAP)  # gradients are there: this is what a strategy waits for
        watch.enter("gradient sync")
        time.sleep(NAP)
        watch.enter("optimizer")
        time.sleep(3 * NAP)
        watch.enter("between steps")
    tags = watch.close_window(images_per_step=100)
    for name, naps in (("data_wait", 1), ("forward_backward", 2), ("communication", 2), ("optimizer", 3)):
        assert tags[f"time/{name}_ms"] >= 1e3 * naps * NAP
        assert tags[f"time/{name}_fraction"] == pytest.approx(naps / 8, abs=0.06)
    assert sum(tags[f"time/{name}_ms"] for name in PHASES.values()) == pytest.approx(tags["time/step_ms"], rel=0.02)
    assert tags["throughput/images_per_second"] == pytest.approx(100 / (tags["time/step_ms"] / 1e3))


def test_with_microbatches_only_the_last_backward_communicates() -> None:
    model = nn.Linear(3, 1)
    watch = Timeline(CPU, model)
    watch.steps = 1
    watch.enter("forward/backward")
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        time.sleep(NAP)
    watch.enter("gradient sync")
    tags = watch.close_window(images_per_step=1)
    assert tags["time/forward_backward_ms"] >= 2e3 * NAP
    assert 1e3 * NAP <= tags["time/communication_ms"] < 2e3 * NAP


def test_each_window_begins_anew_and_the_rate_is_the_median() -> None:
    watch = timeline()
    assert watch.median_rate() == 0
    for seconds in (0.0, 0.001, 0.05):
        list(watch.timed(slow_batches(2, seconds)))
        watch.close_window(images_per_step=10)
        assert watch.steps == 0
        assert watch.intervals == []
    assert watch.median_rate() == sorted(watch.rates)[1]


def test_every_batch_is_handed_on_in_order() -> None:
    assert list(timeline().timed(range(5))) == list(range(5))


@pytest.mark.parametrize("sync", ["sync=ddp", "sync=allreduce", "sync=parameter_server"])
def test_a_run_records_the_phases_of_its_steps(sync: str, tmp_path) -> None:
    train_on(2, *TINY, sync, f"output_dir={tmp_path}", "name=run", "log_every_steps=4", "max_steps=8")
    logged = records(tmp_path / "run", "time/step_ms")
    assert len(logged) == 2
    for record in logged:
        phases = {name: record[f"time/{name}_ms"] for name in PHASES.values()}
        assert sum(phases.values()) == pytest.approx(record["time/step_ms"], rel=0.05)
        assert all(phases[name] > 0 for name in ("data_wait", "forward_backward", "communication", "optimizer"))
