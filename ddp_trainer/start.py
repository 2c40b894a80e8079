"""The start of a run: data set, process group, checks that ranks agree, and builders of parts."""

import os
import shutil
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ddp_trainer import registry
from ddp_trainer.async_step import AsyncStep
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.differences import differences, flatten_keys
from ddp_trainer.config.errors import require
from ddp_trainer.config.images import DataConfig
from ddp_trainer.config.losses import LossConfig
from ddp_trainer.config.plugins import plugin_versions
from ddp_trainer.config.schema import Config, OnNonfinite, Precision
from ddp_trainer.config.sync import AsyncParameterServerConfig, BatchNorm, PipelineConfig
from ddp_trainer.cuda_graphs import CapturedStep, capture_loader, uses_graphs
from ddp_trainer.data.build import build_datasets, build_loaders, class_counts
from ddp_trainer.data.dataset import Datasets, num_samples
from ddp_trainer.data.loaders import Loaders
from ddp_trainer.distributed.environment import Environment, c_compilers, installed_versions
from ddp_trainer.distributed.membership import Membership
from ddp_trainer.distributed.process_group import prepare, process_group
from ddp_trainer.distributed.seeding import derive_seed
from ddp_trainer.distributed.world import World
from ddp_trainer.models import build_model
from ddp_trainer.optim.interfaces import Factor, Loss
from ddp_trainer.optim.losses import class_weights, weigh
from ddp_trainer.optim.optimizers import build_optimizer
from ddp_trainer.optim.schedulers import lr_factor
from ddp_trainer.runtime import keep_freed_memory
from ddp_trainer.sharded_step import ShardedStep
from ddp_trainer.sync import build_sync
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.sync.batch_norm import synchronize_batch_norm
from ddp_trainer.sync.shards import samples_of, shards_of
from ddp_trainer.training.step import StepSettings, TrainStep


@dataclass(frozen=True, slots=True)
class Setup:
    """Config, process group, data and memory layout of a run, and builders of its parts."""

    config: Config
    """The config, in which "auto" of precision and channels_last is resolved for this hardware."""
    world: World
    datasets: Datasets
    memory_format: torch.memory_format

    def build_loaders(self) -> Loaders:
        """Return the data loaders of this rank, for training and for evaluation."""
        loaders = build_loaders(
            self.datasets,
            self.config.data,
            world=self.world,
            seed=self.config.seed,
            global_batch_size=self.config.global_batch_size,
            eval_batch_size=-(-self.config.eval_batch_size // (self.config.shards or 1)),
            memory_format=self.memory_format,
            share=self.share,
        )
        return capture_loader(loaders) if uses_graphs(self.config, self.world) else loaders

    @property
    def share(self) -> range | None:
        """The positions of this rank's samples in each global batch if there are shards."""
        num_shards = self.config.shards
        if num_shards is None:
            return None
        samples = samples_of(
            self.shards, num_shards=num_shards, batch_size=self.config.global_batch_size
        )
        return range(samples[0].start, samples[-1].stop)

    @property
    def shards(self) -> range:
        """The shards of this rank; none without `shards`."""
        return shards_of(
            self.world.rank,
            world_size=self.world.world_size,
            num_shards=self.config.shards or 0,
        )

    def lr_factor(self, epochs: int) -> Factor:
        """Return the schedule of a training of so many epochs."""
        steps = num_samples(self.datasets.train) // self.config.global_batch_size
        return lr_factor(self.config.scheduler, steps_per_epoch=steps, epochs=epochs)

    def step_settings(self) -> StepSettings:
        """Return the values of the config that a step needs."""
        config = self.config
        return StepSettings(
            global_batch_size=config.global_batch_size,
            seed=config.seed,
            gradient_accumulation_steps=len(self.shards) or config.gradient_accumulation_steps,
            max_grad_norm=config.max_grad_norm,
            autocast_dtype=autocast_dtype(config.precision),
            skips_nonfinite=config.on_nonfinite is OnNonfinite.skip,
            ema_decay=config.ema.decay,
        )

    def build_step(self) -> TrainStep:
        """Return this rank's training step, with its model, strategy and optimizer. Collective."""
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
        if getattr(config.sync, "batch_norm", None) is BatchNorm.sync:
            model = synchronize_batch_norm(model, self.world)
        if config.compile:
            # In place and before DDP, so that DDP's hooks stay outside of the graph.
            model.compile(dynamic=False)
        optimizer = build_optimizer(
            config.optimizer, model.parameters(), global_batch_size=config.global_batch_size
        )
        sync = build_sync(config.sync, self.world)
        kind: Callable[..., TrainStep] = TrainStep
        if config.shards is not None:
            sync = GradientSync(config.sync, self.world)  # the step itself sums over ranks
            kind = partial(ShardedStep, num_shards=config.shards)
        elif isinstance(config.sync, AsyncParameterServerConfig) and config.sync.max_staleness:
            sync = GradientSync(config.sync, self.world)  # the step itself sends gradients
            kind = partial(AsyncStep, config=config.sync)
        elif isinstance(config.sync, PipelineConfig):
            from ddp_trainer.pipeline_step import PipelineStep  # imports FSDP and the tracer

            kind = partial(PipelineStep, image_shape=datasets.image_shape)
        elif uses_graphs(config, self.world):
            kind = CapturedStep
        return kind(
            model,
            sync,
            optimizer,
            self.lr_factor(config.epochs),
            loss=build_loss(config.loss, datasets, device=self.world.device),
            settings=self.step_settings(),
            world=self.world,
        )


def set_up(
    config: Config,
    environment: Environment,
    stack: ExitStack,
    *,
    membership: Membership | None = None,
    datasets: Datasets | None = None,
) -> Setup:
    """Read the data set, join the process group until `stack` closes, and compare the ranks.

    Collective: every rank must call this.
    membership: chooses the ranks of the process group. datasets: those of a former group.

    Raises:
        ConfigError: on all ranks, if config, versions or data of any rank are wrong, or differ from
            those of rank 0.
    """
    config.check_world_size(environment.world_size)
    read = partial(read_data, config.data, global_batch_size=config.global_batch_size)
    group = partial(process_group, environment, **config.process_group)
    values = to_builtins(config)
    versions = installed_versions() | {
        f"plug-in {name}": version for name, version in plugin_versions().items()
    }
    if membership is None:
        finish_loading = prepare(read, environment)
        world = stack.enter_context(group())
        check_same("versions", versions, world, fix="install the same versions on all nodes")
        check_same("config values", flatten_keys(values), world, fix="use the same command line")
        datasets = finish_loading(world)
        images = {"fingerprint": datasets.fingerprint}
        check_same("images", images, world, fix="put the same data on every node")
    else:
        datasets = datasets or read()
        # The ranks are compared in the store, so that a wrong one does not disturb the others.
        membership.check_same(versions, values, datasets.fingerprint)
        world = stack.enter_context(group(membership=membership))
    config = resolve_auto(config, world)
    set_torch_switches(world, compile_model=config.compile, deterministic=config.deterministic)
    return Setup(
        config=config,
        world=world,
        datasets=datasets,
        memory_format=memory_format(config.channels_last),
    )


def build_loss(config: LossConfig, datasets: Datasets, *, device: torch.device) -> Loss:
    """Return the loss that `config` chooses; its builder gets the size of each class, if known."""
    counts = class_counts(datasets.train, len(datasets.class_names))
    loss = registry.build("loss", config, class_counts=counts, returns=cast(Any, Callable))
    weights = class_weights(config.class_weights, counts, datasets.class_names)
    return loss if weights is None else weigh(loss, weights.to(device))


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype of matrix products and convolutions; None: the dtype of the parameters."""
    return {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}.get(precision)


def memory_format(channels_last: bool | str) -> torch.memory_format:
    """Return the memory layout of models and batches; "auto" means channels last."""
    return torch.channels_last if channels_last in ("auto", True) else torch.contiguous_format


def read_data(config: DataConfig, *, global_batch_size: int) -> Datasets:
    """Return the data set, downloaded if necessary.

    Call this before joining the group: a download may take longer than a collective's timeout.

    Raises:
        ConfigError: the data set cannot be read, or has fewer training samples than a global batch.
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
    """Check that all ranks have the same `values`. Collective.

    Raises:
        ConfigError: the values differ; the message has `what`, the differing keys and `fix`.
    """
    first, *others = world.all_gather_object(values)
    for rank, other in enumerate(others, 1):
        changes = "; ".join(differences(first, other))
        require(
            not changes, f"rank {rank} was started with other {what} than rank 0 ({changes}): {fix}"
        )


def resolve_auto(config: Config, world: World) -> Config:
    """Return `config` with this hardware's precision and memory layout for "auto". Collective."""
    if config.precision is Precision.auto:
        # All ranks are asked, because nodes may have different processors.
        all_fast = all(world.all_gather_object(has_fast_bf16(world.device)))
        precision = Precision.bf16 if all_fast and config.sync.supports_bf16 else Precision.fp32
        config = replace(config, precision=precision)
    return replace(config, channels_last=config.channels_last in ("auto", True))


def set_torch_switches(world: World, *, compile_model: bool, deterministic: bool) -> None:
    """Set global options of torch and of the memory allocator. Collective.

    Raises:
        ConfigError: on all ranks, if compile=true and a rank cannot compile.
    """
    if world.device.type == "cpu":
        keep_freed_memory()
    if compile_model:
        world.raise_on_any_rank(lambda: check_compiler(world.device))
    if deterministic:
        # cuBLAS needs this variable for deterministic algorithms, and reads it only once.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # setting it is slow
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile, or Triton on a GPU, finds a compiler and Python's headers.

    Raises:
        ConfigError: this host lacks one of them.
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
