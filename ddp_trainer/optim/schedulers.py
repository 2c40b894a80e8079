"""Learning-rate schedules: functions from the step to a factor of the peak learning rate.

A factor depends only on the config and the step, so that a resumed or prolonged run needs no saved
state of the schedule.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from ddp_trainer import registry
from ddp_trainer.config.schedulers import (
    ConstantConfig,
    CosineConfig,
    OneCycleConfig,
    SchedulerConfig,
    StepConfig,
)
from ddp_trainer.optim.interfaces import Factor


def lr_factor(config: SchedulerConfig, *, steps_per_epoch: int, epochs: int) -> Factor:
    """Return the schedule that `config` chooses, with its linear warm-up.

    A warm-up that is longer than `epochs` is replaced by one of `epochs` / 2.
    """
    if config.warmup_epochs > epochs:
        config = replace(config, warmup_epochs=epochs / 2)
    steps = {"steps_per_epoch": steps_per_epoch, "total_steps": steps_per_epoch * epochs}
    after_warmup: Factor = registry.build("scheduler", config, returns=cast(Any, Callable), **steps)
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    return lambda step: (step + 1) / warmup_steps if step < warmup_steps else after_warmup(step)


def build_constant(config: ConstantConfig, *, steps_per_epoch: int, total_steps: int) -> Factor:
    """Return a function that returns 1 for every step."""
    return lambda step: 1.0


def build_step(config: StepConfig, *, steps_per_epoch: int, total_steps: int) -> Factor:
    """Return a function that is 1 at first, and is multiplied by `gamma` every `every_epochs`."""
    return lambda step: config.gamma ** (step // (config.every_epochs * steps_per_epoch))


def build_cosine(config: CosineConfig, *, steps_per_epoch: int, total_steps: int) -> Factor:
    """Return half a cosine that falls from 1 after the warm-up to `final_factor` at the end."""
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    length = max(1, total_steps - warmup_steps)
    return lambda step: _anneal(1.0, config.final_factor, (step - warmup_steps) / length)


def build_onecycle(config: OneCycleConfig, *, steps_per_epoch: int, total_steps: int) -> Factor:
    """Return half a cosine that rises from `initial_factor` to 1, then one down to `final_factor`.

    The factor reaches 1 after the fraction `rise` of all steps.

    Source: Smith and Topin, Super-Convergence, 2017 (arXiv 1708.07120).
    """

    def factor(step: int) -> float:
        done = step / max(1, total_steps - 1)
        if done < config.rise:
            return _anneal(config.initial_factor, 1.0, done / config.rise)
        return _anneal(1.0, config.final_factor, (done - config.rise) / (1 - config.rise))

    return factor


def _anneal(start: float, end: float, done: float) -> float:
    """Return the value at `done` of half a cosine from `start` at 0 to `end` at 1 and above."""
    return end + (start - end) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
