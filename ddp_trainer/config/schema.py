"""The root of the config, for one training run, and the rules that concern several keys."""

import os
from enum import StrEnum
from typing import Any

from ddp_trainer import registry
from ddp_trainer.config.data import DigitsConfig
from ddp_trainer.config.errors import (
    FREE,
    NAMED,
    POSITIVE,
    check_values,
    config_class,
    require,
    rule,
    setting,
)
from ddp_trainer.config.images import DataConfig
from ddp_trainer.config.loggers import JsonlConfig, LoggerConfig, TensorBoardConfig
from ddp_trainer.config.losses import CrossEntropyConfig, LossConfig
from ddp_trainer.config.metrics import MetricConfig, check_value
from ddp_trainer.config.models import ModelConfig, ResNet18Config
from ddp_trainer.config.observers import EarlyStoppingConfig, ObserverConfig
from ddp_trainer.config.optimizers import OptimizerConfig, SGDConfig
from ddp_trainer.config.schedulers import CosineConfig, SchedulerConfig
from ddp_trainer.config.sync import DDPConfig, SyncConfig

DEFAULT_NAME = "${data.name}-${model.name}-${sync.name}"
MAX_NAME_BYTES = 200
"""File systems allow 255, and other files are called after the run directory."""
WEEK_SECONDS = 7 * 24 * 3600

Precision = StrEnum("Precision", ["auto", "fp32", "bf16", "fp16"])
Device = StrEnum("Device", ["auto", "cpu", "cuda"])
Backend = StrEnum("Backend", ["auto", "gloo", "nccl"])
Resume = StrEnum("Resume", ["auto", "never", "must"])
OnNonfinite = StrEnum("OnNonfinite", ["stop", "skip"])
OnCorruption = StrEnum("OnCorruption", ["stop", "exclude"])


@config_class
class CheckpointConfig:
    every_steps: int | None = setting(None, POSITIVE)
    """Optimizer steps between two saves, besides each epoch's end; null: no save by steps."""
    every_seconds: float | None = setting(None, POSITIVE)
    """Seconds between two saves, measured on rank 0; null: no save by time."""
    keep_last: int = setting(3, POSITIVE)
    """Number of the newest checkpoints that are kept on disk; older ones are deleted."""
    keep_best: bool = True
    """Keep the checkpoint with the best value of select_by as best.pt."""


@config_class
class EmaConfig:
    decay: float | None = setting(
        None, rule("greater than 0 and less than 1, or null", lambda value: 0 < value < 1)
    )
    """Decay per step of a moving average of the weights, to evaluate and save; null: no average."""


@config_class
class CheckConfig:
    every_steps: int | None = setting(None, POSITIVE)
    """Optimizer steps between two checks. In a check each rank's gradient is computed again on
    another rank and compared; null: no checks.
    """
    on_corruption: OnCorruption = OnCorruption.stop
    """After a failed check, stop: end the job; exclude: end the job, and let launch/slurm.sbatch
    requeue the job without the faulty node.
    """
    fitness: bool = False
    """Measure the nodes before the start; end the job if one is 15 % below the others' median."""


@config_class
class RecoveryConfig:
    min_ranks: int | None = setting(None, POSITIVE)
    """Train on without a lost rank while so many are left; a rank that torchrun starts again joins.
    null: the loss of a rank ends the job.
    """
    join_seconds: float = setting(60.0, POSITIVE)
    """Seconds for which the start waits for all ranks, and fewer than min_ranks for others."""
    silent_seconds: float = setting(10.0, rule("at least 1", lambda value: value >= 1))
    """A rank without heartbeats for so many seconds is lost, for example with its node. At least 1,
    because ranks that are busy send heartbeats late.
    """


@config_class
class Config:
    """The config of one training run. Batch sizes count the samples of all ranks together."""

    model: ModelConfig = setting(ResNet18Config())
    data: DataConfig = setting(DigitsConfig())
    loss: LossConfig = setting(CrossEntropyConfig())
    optimizer: OptimizerConfig = setting(SGDConfig())
    scheduler: SchedulerConfig = setting(CosineConfig())
    sync: SyncConfig = setting(DDPConfig())
    metric: dict[str, MetricConfig] = setting({}, FREE)
    logger: dict[str, LoggerConfig] = setting(
        {"tensorboard": TensorBoardConfig(), "jsonl": JsonlConfig()}, FREE
    )
    observer: dict[str, ObserverConfig] = setting({}, NAMED)
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), FREE)
    ema: EmaConfig = setting(EmaConfig())
    check: CheckConfig = setting(CheckConfig(), FREE)
    recovery: RecoveryConfig = setting(RecoveryConfig(), FREE)

    name: str = setting(DEFAULT_NAME, FREE)
    """The run directory is <output_dir>/<name>. The default name is <data>-<model>-<sync>."""
    output_dir: str = setting("outputs", FREE)
    """The folder of run directories."""
    seed: int = setting(0, rule("0 to 2^63 - 1", lambda value: 0 <= value < 2**63))
    """Seed of the initial weights, the sample order and the augmentation; 0 to 2^63 - 1."""
    select_by: str = "eval/top1"
    """The value of an evaluation that chooses best.pt, and the best job of a sweep: eval/top1,
    eval/loss, or eval/NAME with metric=[NAME].
    """
    epochs: int = setting(10, POSITIVE | NAMED)
    """Passes over the training split; the last, incomplete global batch of each pass is dropped."""
    max_steps: int | None = setting(None, POSITIVE | FREE)
    """Stop after this many optimizer steps, counted over all launches; null: train all epochs."""
    global_batch_size: int = setting(256, POSITIVE)
    """Samples per optimizer step over all ranks and gradient accumulation steps."""
    eval_batch_size: int = setting(1024, POSITIVE | FREE)
    """Samples per evaluation batch over all ranks; changes speed and memory, never the result."""
    gradient_accumulation_steps: int = setting(1, POSITIVE)
    """Forward and backward passes per optimizer step; more of them need less memory."""
    shards: int | None = setting(None, POSITIVE)
    """Parts of a global batch, at least as many as ranks; the bits of a run then do not depend on
    the number of ranks. null: sums over ranks are rounded in an order that depends on it.
    """
    precision: Precision = Precision.auto
    """auto: bf16 if the hardware of every rank multiplies bf16 fast, else fp32."""
    channels_last: bool | str = setting(
        "auto", NAMED | rule("auto, true or false", lambda value: value in ("auto", True, False))
    )
    """Keep images and weights in the memory layout NHWC; auto: true."""
    compile: bool = setting(False, NAMED)
    """Compile the model with torch.compile: the start is slower, each step is faster."""
    cuda_graphs: bool | str = setting(
        "auto", NAMED | rule("auto, true or false", lambda value: value in ("auto", True, False))
    )
    """Launch a step on a GPU as one CUDA graph, which repeats what the first steps did; auto: if
    there is one rank, the model is lenet or resnet18, and no part of a step is a plug-in.
    """
    deterministic: bool = setting(False, NAMED)
    """Use deterministic algorithms. GPU runs need them to be bitwise equal; CPU runs do not."""
    num_threads: int | str = setting(
        "auto",
        FREE | rule("auto or 1 to 1024", lambda value: value in ("auto", *range(1, 1025))),
    )
    """Threads per rank; auto: usable cores / local ranks, ignoring OMP_NUM_THREADS; with shards, 1.
    """
    device: Device = setting(Device.auto, FREE)
    """auto: cuda if there is a GPU, else cpu."""
    backend: Backend = setting(Backend.auto, FREE)
    """auto: nccl on cuda, gloo on cpu."""
    timeout_seconds: int = setting(
        120, FREE | rule(f"1 to {WEEK_SECONDS}, a week", lambda value: 0 < value <= WEEK_SECONDS)
    )
    """Time limit, in seconds, of the start and of each collective. A job that makes no progress for
    half of this time is ended.
    """
    max_grad_norm: float | None = setting(None, POSITIVE)
    """Gradients whose 2-norm is larger than this are scaled down to it; null: no limit."""
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    """What to do about a loss or gradient that is not finite: stop the run, or skip that update."""
    log_every_steps: int = setting(20, POSITIVE | FREE)
    """Optimizer steps between two log entries. The CPU waits for the GPU only at log entries and
    once a second.
    """
    report: bool = setting(False, FREE)
    """Write report.html at the end of a launch, with the scores of the last evaluation."""
    resume: Resume = setting(Resume.auto, FREE)
    """auto: resume from the newest checkpoint, if there is one; must: fail if there is none; never:
    start from step 0.
    """

    def __post_init__(self) -> None:
        if self.name == DEFAULT_NAME:  # a name from Hydra is already resolved
            self.name = f"{self.data.name}-{self.model.name}-{self.sync.name}"
        if self.shards is not None and self.num_threads == "auto":
            self.num_threads = 1  # because it must not depend on the number of ranks
        check_values(self)
        self._check_paths()
        self._check_choices()
        self._check_together()
        self._check_evaluation_values()
        self._check_shards()
        self._check_recovery()

    @property
    def process_group(self) -> dict[str, Any]:
        """The keyword arguments for the function ``distributed.process_group.process_group``."""
        return {
            key: getattr(self, key)
            for key in ("device", "backend", "num_threads", "timeout_seconds")
        }

    def _check_paths(self) -> None:
        require(
            self.name not in ("", ".", "..") and "/" not in self.name and self.name.isprintable(),
            f"name={self.name!r} must be one plain name, without /: it is the run's folder in"
            " output_dir",
        )
        require(
            len(self.name.encode()) <= MAX_NAME_BYTES,
            f"name={self.name[:20]}… has {len(self.name.encode())} bytes: use at most"
            f" {MAX_NAME_BYTES}, because it is the name of a folder",
        )
        require(
            self.output_dir != "",
            "output_dir= is empty: give a folder, for example . for the current one",
        )
        require(
            not os.path.expanduser(self.output_dir).startswith("~"),
            f"output_dir={self.output_dir} begins with ~ of an unknown user: give a full path",
        )

    @property
    def sections(self) -> dict[str, Any]:
        """The chosen sections of all groups by key, such as ``model`` or ``logger.jsonl``."""
        return {
            key: section
            for name, group in registry.GROUPS.items()
            for key, section in group.sections(getattr(self, name)).items()
        }

    def is_higher_better(self, value: str) -> bool:
        """Return whether a larger `value` is better: not of eval/loss, else as its metric says."""
        metric = self.metric.get(value.removeprefix("eval/"))
        return value != "eval/loss" if metric is None else metric.higher_is_better

    def _check_choices(self) -> None:
        for key, chosen in self.sections.items():
            choice = registry.find(key.partition(".")[0], type(chosen))
            require(
                choice is not None and chosen.name == choice.name,
                f"{key}={chosen.name} is not the name under which {type(chosen).__name__} is"
                " registered: leave `name` of a registered class at its default, or register"
                f" a class whose default `name` is {chosen.name}",
            )

    def _check_together(self) -> None:
        sync = self.sync
        require(
            self.global_batch_size >= self.gradient_accumulation_steps,
            f"gradient_accumulation_steps={self.gradient_accumulation_steps} must be at most "
            f"global_batch_size={self.global_batch_size}",
        )
        require(
            self.backend is not Backend.nccl or self.device is not Device.cpu,
            "backend=nccl needs GPUs and does not work with device=cpu: use backend=gloo, or"
            " device=cuda",
        )
        require(
            self.on_nonfinite is OnNonfinite.stop or self.optimizer.skips_nonfinite,
            "on_nonfinite=skip needs an optimizer that can skip an update, and"
            f" optimizer={self.optimizer.name} cannot: use optimizer=sgd or adamw, or"
            " on_nonfinite=stop",
        )
        require(
            self.on_nonfinite is OnNonfinite.stop or not sync.is_asynchronous,
            "on_nonfinite=skip needs ranks that leave out an update together, and with"
            f" sync={sync.name} each goes on by itself: use on_nonfinite=stop, or sync=ddp",
        )
        require(
            self.ema.decay is None or sync.supports_ema,
            f"ema.decay={self.ema.decay} needs parameters that are equal on all ranks after each"
            f" step, and sync={sync.name} does not keep them equal: use sync=ddp, or"
            " ema.decay=null",
        )
        require(
            self.check.every_steps is None
            or (sync.supports_check and getattr(sync, "batch_norm", "local") == "local"),
            f"check.every_steps={self.check.every_steps} needs a replica in each process, with its"
            " own statistics: use sync=ddp with sync.batch_norm=local, or check.every_steps=null",
        )
        require(
            self.precision is not Precision.fp16 or sync.supports_fp16,
            "precision=fp16 needs all gradients on every rank to scale the loss, and with"
            f" sync={sync.name} a rank has only its own: use precision=bf16, or sync=ddp",
        )
        require(
            self.precision is not Precision.bf16 or sync.supports_bf16,
            f"sync={sync.name} cannot run a model in bf16: use precision=fp32, or sync=ddp",
        )
        require(
            not self.compile or sync.supports_compile,
            f"sync={sync.name} cannot run a compiled model: use compile=false, or sync=ddp",
        )
        require(
            self.optimizer.is_elementwise or not sync.shards_parameters,
            f"optimizer={self.optimizer.name} needs whole parameters, and with sync={sync.name} a"
            " rank has a part of each: use optimizer=sgd or adamw, or sync=ddp",
        )

    def _check_evaluation_values(self) -> None:
        check_value("select_by", self.select_by, self.metric)
        for name, observer in self.observer.items():
            if isinstance(observer, EarlyStoppingConfig) and observer.monitor is not None:
                check_value(f"observer.{name}.monitor", observer.monitor, self.metric)

    def _check_shards(self) -> None:
        if self.shards is None:
            return
        sync = self.sync
        require(
            self.shards <= self.global_batch_size,
            f"shards={self.shards} must be at most global_batch_size={self.global_batch_size}",
        )
        require(
            self.gradient_accumulation_steps == 1,
            f"gradient_accumulation_steps={self.gradient_accumulation_steps} and"
            f" shards={self.shards} exclude each other: a rank has one pass for each of its shards",
        )
        require(
            sync.name in ("ddp", "none")
            and getattr(sync, "comm_hook", "none") == "none"
            and getattr(sync, "batch_norm", "local") == "local",
            f"shards={self.shards} has its own way to sum gradients: use sync=ddp with"
            " sync.comm_hook=none and sync.batch_norm=local",
        )
        require(
            self.check.every_steps is None,
            f"check.every_steps={self.check.every_steps} compares the gradients of ranks, and with"
            f" shards={self.shards} these are sums over shards: use check.every_steps=null",
        )

    def _check_recovery(self) -> None:
        min_ranks = self.recovery.min_ranks
        sync = self.sync
        require(
            min_ranks is None
            or (sync.supports_recovery and getattr(sync, "comm_hook", "none") != "powersgd"),
            f"recovery.min_ranks={min_ranks} needs ranks with the same parameters and optimizer"
            f" state, and sync={sync.name} (or powersgd) does not keep them: use sync=ddp with"
            " another sync.comm_hook, or recovery.min_ranks=null",
        )

    def check_world_size(self, world_size: int) -> None:
        """Raise ConfigError if a rank has too few samples, or `sync` needs another world size."""
        require(
            self.global_batch_size >= world_size,
            f"global_batch_size={self.global_batch_size} must be at least the world size,"
            f" {world_size}: each rank needs a sample: raise global_batch_size, or start fewer"
            " ranks",
        )
        require(
            self.shards is None or self.shards >= world_size,
            f"shards={self.shards} must be at least the number of ranks, {world_size}: each rank"
            " computes whole shards: start fewer ranks (shards cannot change within a run)",
        )
        self.sync.check_world_size(world_size)
        unit = self.sync.batch_unit(world_size, self.gradient_accumulation_steps)
        require(
            self.global_batch_size % unit == 0,
            f"global_batch_size={self.global_batch_size} must be a multiple of {unit}, because with"
            f" sync={self.sync.name} ranks pass shares or microbatches of others, all of one size:"
            f" set global_batch_size={-(-self.global_batch_size // unit) * unit}, or use sync=ddp",
        )
        min_ranks = self.recovery.min_ranks
        require(
            min_ranks is None or min_ranks <= world_size,
            f"recovery.min_ranks={min_ranks} must be at most the number of ranks, {world_size}",
        )
        share = self.global_batch_size // world_size
        require(
            self.gradient_accumulation_steps <= share,
            f"gradient_accumulation_steps={self.gradient_accumulation_steps} must be at most the"
            f" {share} samples of a rank: lower it, or raise"
            f" global_batch_size={self.global_batch_size}",
        )
