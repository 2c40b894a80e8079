"""Ranks meet: data prepared, versions and configs compared, auto settled, the data read."""

from __future__ import annotations

import os
import shutil
import sysconfig
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ddp_trainer.composition import digest, to_builtins
from ddp_trainer.config import Config, ConfigError, DataParallelConfig, Precision, flatten, require
from ddp_trainer.data import GlobalBatchSampler, Splits, load_splits, prepare
from ddp_trainer.distributed import World, connected
from ddp_trainer.environment import Environment
from ddp_trainer.memory import keep_freed_memory
from ddp_trainer.rollcall import versions


def start(config: Config, environment: Environment, stack: ExitStack) -> tuple[Config, World, Splits]:
    """Join the process group until `stack` closes. Return the config with auto settled, the world and the data.

    Collective: every rank must call this.

    Raises:
        ConfigError: on all ranks, when the config, a version or the data of one is at fault.
    """
    config.check_world_size(environment.world_size)
    refusal = prepare_data(config)
    world = stack.enter_context(connected(config, environment))
    check_same_start(config, world)
    config = settle(config, world)
    return config, world, world.together(lambda: load(config, world, refusal))


def prepare_data(config: Config) -> ConfigError | None:
    """Download what is missing before ranks begin to wait for each other. Return the refusal, to be raised by all."""
    try:
        prepare(config.data)
    except ConfigError as error:
        return error
    return None


def check_same_start(config: Config, world: World) -> None:
    """Refuse to train when ranks were started with different versions or configs. Collective.

    Raises:
        ConfigError: names what differs.
    """
    starts = world.gather({"config": digest(config), **versions()})
    for rank, start in enumerate(starts):
        differ = [
            f"{name} {start[name]} and rank 0 {starts[0][name]}"
            for name in versions()
            if start[name] != starts[0][name]
        ]
        require(not differ, f"rank {rank} has {', '.join(differ)}: install the same on all nodes")
    if all(start == starts[0] for start in starts):
        return
    flats = world.gather(flatten(to_builtins(config)))
    for rank, flat in enumerate(flats):
        keys = [f"{key}: {flats[0].get(key)} → {flat.get(key)}" for key in flat if flat[key] != flats[0].get(key)]
        require(not keys, f"rank {rank} was started with another config ({'; '.join(keys)}): use one command line")


def settle(config: Config, world: World) -> Config:
    """Replace auto by what it means on this hardware, and set torch's global switches."""
    if config.precision is Precision.auto:
        threaded = isinstance(config.sync, DataParallelConfig)  # bf16 does not get there
        fast = not threaded and all(world.gather(has_fast_bf16(world.device)))  # or ranks would train differently
        config = replace(config, precision=Precision.bf16 if fast else Precision.fp32)
    config = replace(config, channels_last=config.channels_last in ("auto", True))
    if world.device.type == "cpu":
        keep_freed_memory()
        world.together(lambda: require(not config.compile or can_compile(), CANNOT_COMPILE))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses; read when it is first used
    if config.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it is slow
        torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    return config


CANNOT_COMPILE = (
    "compile=true on a CPU needs a C++ compiler and Python's headers, and this host lacks one of them: install g++ and "
    "python3-dev, or use compile=false"
)


def can_compile() -> bool:
    """Say whether torch.compile finds what it makes CPU kernels with."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return headers.exists() and any(shutil.which(compiler) for compiler in ("g++", "clang++"))


def has_fast_bf16(device: torch.device) -> bool:
    """Say whether `device` has instructions that multiply bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def load(config: Config, world: World, refusal: ConfigError | None) -> Splits:
    """Read the data and check the batch arithmetic against it."""
    if refusal is not None:
        raise refusal
    splits = load_splits(config.data, seed=config.seed)
    require(len(splits.eval) > 0, f"data={config.data.name} has no evaluation samples: top-1 of none is undefined")
    GlobalBatchSampler(
        splits.train.labels,
        global_batch_size=config.global_batch_size,
        num_replicas=world.world_size,
        rank=world.rank,
    )
    return splits
