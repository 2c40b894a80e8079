"""Learning-rate schedules: the factor of the peak learning rate as a closed form of the step.

A resumed or prolonged run therefore needs no history of the schedule.
"""

import math
from collections.abc import Callable

from ddp_trainer import registry
from ddp_trainer.config.schedulers import ConstantConfig, CosineConfig, OneCycleConfig, SchedulerConfig, StepConfig

Factor = Callable[[int], float]
"""A function from the optimizer step, counted from 0, to the learning rate divided by its peak."""


def lr_factor(config: SchedulerConfig, *, steps_per_epoch: int, total_steps: int) -> Factor:
    """Return the schedule that `config` chooses as a function, with its linear warm-up."""
    choice = registry.find("scheduler", type(config))
    assert choice is not None
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    after_warmup: Factor = choice.build(config, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
    return lambda step: (step + 1) / warmup_steps if step < warmup_steps else after_warmup(step)


def build_constant(config: ConstantConfig, *, steps_per_epoch: int, total_steps: int) -> Factor:
    """Return the constant 1."""
    return lambda step: 1.0


def build_step(config: StepConfig, *, steps_per_epoch: int, total_steps: int) -> Factor:
    """Return a factor that is multiplied by gamma every `every_epochs` epochs."""
    return lambda step: config.gamma ** (step // (config.every_epochs * steps_per_epoch))


def build_cosine(config: CosineConfig, *, steps_per_epoch: int, total_steps: int) -> Factor:
    """Return half a cosine from 1, after the warm-up, to `final_factor` at the last step."""
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    length = max(1, total_steps - warmup_steps)
    return lambda step: _anneal(1.0, config.final_factor, (step - warmup_steps) / length)


def build_onecycle(config: OneCycleConfig, *, steps_per_epoch: int, total_steps: int) -> Factor:
    """Return half a cosine up from `initial_factor` to 1, then half a cosine down to `final_factor`.

    Source: Smith and Topin, Super-Convergence, 2017 (arXiv 1708.07120).
    """

    def factor(step: int) -> float:
        done = step / max(1, total_steps - 1)
        if done < config.rise:
            return _anneal(config.initial_factor, 1.0, done / config.rise)
        return _anneal(1.0, config.final_factor, (done - config.rise) / (1 - config.rise))

    return factor


def _anneal(start: float, end: float, done: float) -> float:
    """Return the value, at the share `done` in [0, 1], of half a cosine from `start` to `end`."""
    return end + (start - end) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
