"""The start of a run: data set, process group, comparison of ranks, and what is built of them."""

import os
import shutil
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LambdaLR

from ddp_trainer import registry
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.data import DataConfig
from ddp_trainer.config.differences import differences
from ddp_trainer.config.errors import flatten_keys, require
from ddp_trainer.config.losses import LossConfig
from ddp_trainer.config.schema import Config, OnNonfinite, Precision
from ddp_trainer.data.build import build_datasets
from ddp_trainer.data.dataset import Datasets, class_counts, num_samples
from ddp_trainer.data.loaders import Loaders, build_loaders
from ddp_trainer.distributed.environment import Environment, c_compilers, installed_versions
from ddp_trainer.distributed.process_group import prepare, process_group
from ddp_trainer.distributed.seeding import derive_seed
from ddp_trainer.distributed.world import World
from ddp_trainer.models import build_model
from ddp_trainer.runtime import keep_freed_memory
from ddp_trainer.sync import build_sync
from ddp_trainer.training.losses import Loss
from ddp_trainer.training.optimizers import build_optimizer
from ddp_trainer.training.schedulers import lr_factor
from ddp_trainer.training.step import StepSettings, TrainStep


@dataclass(frozen=True, slots=True)
class Start:
    """Config, process group, data and memory layout of a run, and builders of its parts."""

    config: Config
    """The config; precision=auto and channels_last=auto are replaced by the values for this
    hardware.
    """
    world: World
    datasets: Datasets
    memory_format: torch.memory_format

    def build_loaders(self) -> Loaders:
        """Return the data loaders of this rank, for training and for evaluation."""
        return build_loaders(
            self.datasets,
            self.config.data,
            world=self.world,
            seed=self.config.seed,
            global_batch_size=self.config.global_batch_size,
            eval_batch_size=self.config.eval_batch_size,
            memory_format=self.memory_format,
        )

    def step_settings(self) -> StepSettings:
        """Return the values of the config that a step needs."""
        config = self.config
        return StepSettings(
            global_batch_size=config.global_batch_size,
            seed=config.seed,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            max_grad_norm=config.max_grad_norm,
            autocast_dtype=autocast_dtype(config.precision),
            skips_nonfinite=config.on_nonfinite is OnNonfinite.skip,
            ema_decay=config.ema.decay,
        )

    def build_step(self) -> TrainStep:
        """Return the training step of this rank, with its model, strategy and optimizer."""
        config = self.config
        datasets = self.datasets
        num_classes = len(datasets.class_names)
        torch.manual_seed(derive_seed(config.seed, purpose="model"))
        model = self.world.raise_on_any_rank(  # the weights file may be missing on some nodes
            lambda: build_model(
                config.model, image_shape=datasets.image_shape, num_classes=num_classes
            )
        )
        model.to(self.world.device).to(memory_format=self.memory_format)
        if config.compile:
            # In place and before DDP, so that DDP's hooks stay outside of the graph.
            model.compile(dynamic=False)
        optimizer = build_optimizer(
            config.optimizer, model.parameters(), global_batch_size=config.global_batch_size
        )
        steps_per_epoch = num_samples(datasets.train) // config.global_batch_size
        factor = lr_factor(
            config.scheduler,
            steps_per_epoch=steps_per_epoch,
            total_steps=steps_per_epoch * config.epochs,
        )
        return TrainStep(
            model,
            build_sync(config.sync, self.world),
            optimizer,
            LambdaLR(optimizer, factor),
            loss=build_loss(config.loss, datasets),
            settings=self.step_settings(),
            world=self.world,
        )


def start(config: Config, environment: Environment, stack: ExitStack) -> Start:
    """Read the data set, join the process group until `stack` closes, compare ranks, and resolve
    some "auto" values.

    Raises ConfigError on all ranks if config, versions or data of any rank are wrong, or differ
    from those of rank 0. Collective: every rank must call this.
    """
    config.check_world_size(environment.world_size)
    batch = config.global_batch_size
    data = prepare(lambda: read_data(config.data, global_batch_size=batch), environment)
    world = stack.enter_context(process_group(environment, **config.process_group))
    versions = installed_versions() | {
        f"plug-in {name}": v for name, v in registry.plugin_versions().items()
    }
    check_same("versions", versions, world, fix="install the same versions on all nodes")
    check_same(
        "config values", flatten_keys(to_builtins(config)), world, fix="use the same command line"
    )
    config = resolve_auto(config, world)
    set_torch_switches(world, compile_model=config.compile, deterministic=config.deterministic)
    datasets = data(world)
    images = {"fingerprint": datasets.fingerprint}
    check_same("images", images, world, fix="put the same data on every node")
    return Start(
        config=config,
        world=world,
        datasets=datasets,
        memory_format=memory_format(config.channels_last),
    )


def build_loss(config: LossConfig, datasets: Datasets) -> Loss:
    """Return the loss that `config` chooses; its builder gets the size of each class, if known."""
    counts = class_counts(datasets.train, len(datasets.class_names))
    return registry.build("loss", config, class_counts=counts, returns=cast(Any, Callable))


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype of matrix products and convolutions; None: the dtype of the parameters."""
    return {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}.get(precision)


def memory_format(channels_last: bool | str) -> torch.memory_format:
    """Return the memory layout of models and batches; "auto" means channels last."""
    return torch.channels_last if channels_last in ("auto", True) else torch.contiguous_format


def read_data(config: DataConfig, *, global_batch_size: int) -> Datasets:
    """Return the data set, downloaded if necessary; ConfigError if too small. Call this before the
    first collective.
    """
    datasets = build_datasets(config)
    count = num_samples(datasets.train)
    require(
        global_batch_size <= count,
        f"global_batch_size={global_batch_size} must be at most the number of training samples,"
        f" {count}",
    )
    return datasets


def check_same(what: str, values: dict[str, Any], world: World, *, fix: str) -> None:
    """Check that all ranks have the same `values`; ConfigError has `what`, the differing keys and
    `fix`. Collective.
    """
    first, *others = world.all_gather_object(values)
    for rank, other in enumerate(others, 1):
        changes = "; ".join(differences(first, other))
        require(
            not changes, f"rank {rank} was started with other {what} than rank 0 ({changes}): {fix}"
        )


def resolve_auto(config: Config, world: World) -> Config:
    """Return `config` with the precision and memory layout for this hardware in place of "auto".
    Collective.
    """
    if config.precision is Precision.auto:
        # else precisions would differ
        all_fast = all(world.all_gather_object(has_fast_bf16(world.device)))
        precision = Precision.bf16 if all_fast and config.sync.supports_bf16 else Precision.fp32
        config = replace(config, precision=precision)
    return replace(config, channels_last=config.channels_last in ("auto", True))


def set_torch_switches(world: World, *, compile_model: bool, deterministic: bool) -> None:
    """Set global options of torch and of the memory allocator; ConfigError if a rank cannot
    compile. Collective.
    """
    if world.device.type == "cpu":
        keep_freed_memory()
    if compile_model:
        world.raise_on_any_rank(lambda: check_compiler(world.device))
    if deterministic:
        # else cuBLAS fails; it reads this once
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # setting it is slow
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile, or Triton on a GPU, finds the compiler and headers that it needs;
    else ConfigError.
    """
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compilers = c_compilers() if device.type == "cuda" else ("g++", "clang++")
    require(
        headers.exists() and any(map(shutil.which, compilers)),
        "compile=true needs a C++ compiler (on a GPU, a C compiler) and Python's headers, and this"
        " host lacks one of them: install g++ and python3-dev, or use compile=false",
    )


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether `device` has instructions that multiply bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
