"""Short runs on forked ranks, and what is in their directories."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import hydra
import torch
from processes import on_ranks, start_ranks, wait_for
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_flatten_with_path

from ddp_trainer import registry
from ddp_trainer.config.composition import config_dir, register_configs, to_config
from ddp_trainer.config.messages import check_overrides
from ddp_trainer.config.schema import Config, Device
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.process_group import process_group
from ddp_trainer.distributed.world import World
from ddp_trainer.training.step import StepSettings
from ddp_trainer.training_run import run

TINY = (
    "model=lenet",
    "data=synthetic",
    "data.num_train=96",
    "data.num_eval=31",
    "data.channels=1",
    "data.height=12",
    "data.width=12",
    "data.mean=[0.5]",
    "data.std=[0.25]",
    "precision=fp32",
    "num_threads=1",  # a second thread is slower while other tests use the cores
    "global_batch_size=12",
    "epochs=2",
    "logger=[jsonl]",  # TensorBoard would take as long as the training
)
"""Overrides for a run of 16 steps that takes a fraction of a second once torch is imported."""
TENSORBOARD = "logger=[tensorboard,jsonl]"
"""The default, which `TINY` changes."""
BATCHNORM = ("model=timm", "model.arch=test_resnet")
"""Overrides for a small model with BatchNorm: 373,370 parameters for images with one channel."""


ON_CPU = Config(device=Device.cpu, num_threads=1)
"""The config of a process group for tests that train nothing with the whole trainer."""


Choices = tuple[registry.Choice, ...]
"""All choices of all groups, which plug-ins of a test may change."""


@lru_cache(maxsize=1)
def _register(_choices: Choices) -> None:
    """Register the schemas with Hydra, again only if the choices have changed since the
    last call.
    """
    register_configs()


@cache
def _compose(overrides: tuple[str, ...], choices: Choices) -> Config:
    check_overrides(overrides)
    _register(choices)
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return to_config(hydra.compose("config", list(overrides)))


def compose(*overrides: str) -> Config:
    """Return the config that the command line would make of `overrides`. It takes 0.2 s for the
    first time, so give configs to ranks.
    """
    choices = [choice for group in registry.GROUPS for choice in registry.choices(group).values()]
    return deepcopy(_compose(overrides, tuple(choices)))


def world_of(rank: int = 0, world_size: int = 1, *, device: str = "cpu") -> World:
    """Return the world of one rank, on one node, without a process group."""
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        device=torch.device(device),
        backend="gloo" if device == "cpu" else "nccl",
        num_threads=1,
    )


@contextmanager
def in_process_group(config: Config = ON_CPU) -> Iterator[World]:
    """Join the process group of this process's ranks as `config` says, and leave it again."""
    with process_group(read_environment(), **config.process_group) as world:
        yield world


def train(config: Config) -> str:
    """Train as one rank, in one of the processes that `on_ranks` and `start_ranks` start."""
    return run(config).to_json()


def train_on(world_size: int, *overrides: str, deadline: float = 60) -> dict[str, Any]:
    """Train with `overrides` on so many ranks and return the summary."""
    return json.loads(on_ranks(world_size, train, compose(*overrides), deadline=deadline)[0])


def _train_one_after_another(configs: list[Config]) -> None:
    with in_process_group(configs[0]):
        for config in configs:
            run(config)


def train_all(world_size: int, jobs: list[tuple[str, ...]], *, deadline: float = 240) -> None:
    """Train `jobs`, each its overrides, one after another in one process group: a run then takes
    half a second.
    """
    on_ranks(
        world_size,
        _train_one_after_another,
        [compose(*overrides) for overrides in jobs],
        deadline=deadline,
    )


def kill_in_training(world_size: int, config: Config, run_dir: Path, *, after: float) -> None:
    """Train in processes of this job's own, and kill them all `after` seconds after their first
    save.
    """
    before = newest_step(run_dir)
    processes = start_ranks(world_size, train, config)
    wait_for(lambda: newest_step(run_dir) > before)
    time.sleep(after)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def records(run_dir: Path, tag: str | None = None) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl, or those that have `tag`."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if tag is None or tag in line]


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return what summary.json holds."""
    return json.loads((run_dir / "summary.json").read_text())


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest step checkpoint, 0 if there is none."""
    return max(
        (int(path.stem[5:]) for path in (run_dir / "checkpoints").glob("step-*.pt")), default=0
    )


def newest_checkpoint(run_dir: Path) -> dict[str, Any]:
    """Return the state in the newest step checkpoint."""
    return torch.load(
        run_dir / f"checkpoints/step-{newest_step(run_dir):08d}.pt", weights_only=True
    )


def trained_state(run_dir: Path) -> dict[str, Any]:
    """Return what the last checkpoint says of training, less the clock."""
    state = newest_checkpoint(run_dir)
    state.pop("config")
    state["progress"].pop("seconds")
    return state


def assert_bitwise(left: Any, right: Any) -> None:
    """Assert that two states are equal, tensors bit by bit."""
    ours, structure = tree_flatten_with_path(left)
    theirs, other_structure = tree_flatten_with_path(right)
    assert structure == other_structure
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        assert type(one) is type(other), path
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, path
            assert torch.equal(one, other), path
        else:
            assert one == other, path


def step_settings(**values: Any) -> StepSettings:
    """Return settings of a step: those of a plain run, but for `values`."""
    plain: dict[str, Any] = {
        "global_batch_size": 8,
        "seed": 0,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": None,
        "autocast_dtype": None,
        "skips_nonfinite": False,
        "ema_decay": None,
    }
    return StepSettings(**plain | values)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, [B]."""
    return cross_entropy(logits, labels, reduction="none")
