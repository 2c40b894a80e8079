"""The root of the config: one training run, with a choice of each group, and the rules that involve
several keys.
"""

import os
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddp_trainer import registry
from ddp_trainer.config.data import DataConfig, DigitsConfig
from ddp_trainer.config.errors import BELOW_ONE, FREE, POSITIVE, check_values, require, rule
from ddp_trainer.config.loggers import JsonlConfig, LoggerConfig, TensorBoardConfig
from ddp_trainer.config.models import ModelConfig, ResNet18Config
from ddp_trainer.config.optimizers import OptimizerConfig, SGDConfig
from ddp_trainer.config.schedulers import CosineConfig, SchedulerConfig
from ddp_trainer.config.sync import DDPConfig, SyncConfig

DEFAULT_NAME = "${data.name}-${model.name}-${sync.name}"
WEEK_SECONDS = 7 * 24 * 3600

Precision = StrEnum("Precision", ["auto", "fp32", "bf16", "fp16"])
Device = StrEnum("Device", ["auto", "cpu", "cuda"])
Backend = StrEnum("Backend", ["auto", "gloo", "nccl"])
Resume = StrEnum("Resume", ["auto", "never", "must"])
OnNonfinite = StrEnum("OnNonfinite", ["stop", "skip"])
OnCorruption = StrEnum("OnCorruption", ["stop", "exclude"])


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int | None = field(default=None, metadata=POSITIVE)
    """Optimizer steps between two saves, in addition to a save at each epoch's end; null: only at
    each epoch's end.
    """
    every_seconds: float | None = field(default=None, metadata=POSITIVE)
    """Seconds after the last save, by the clock of rank 0, at which the next save is due; null: no
    save by time.
    """
    keep_last: int = field(default=3, metadata=POSITIVE)
    """Number of the newest checkpoints that are kept on disk; older ones are deleted."""
    keep_best: bool = True
    """Keep the checkpoint of the highest eval/top1 as best.pt."""


@dataclass(kw_only=True, slots=True)
class EmaConfig:
    decay: float | None = field(
        default=None,
        metadata=rule("greater than 0 and less than 1, or null", lambda value: 0 < value < 1),
    )
    """Decay per step of a moving average of the weights, which is evaluated and saved; null: no
    average.
    """


@dataclass(kw_only=True, slots=True)
class CheckConfig:
    every_steps: int | None = field(default=None, metadata=POSITIVE)
    """Steps between two checks, which compute each rank's gradient again on another rank and
    compare; null: never.
    """
    on_corruption: OnCorruption = OnCorruption.stop
    """stop: end the job; exclude: end it, and let launch/slurm.sbatch requeue it without the faulty
    node.
    """
    fitness: bool = False
    """Before the job starts, compare the speed of its nodes and report a node that is 15 % slower
    than the others.
    """


@dataclass(kw_only=True, slots=True)
class Config:
    """The config of one training run. Batch sizes count the samples of all ranks together."""

    model: ModelConfig = field(default_factory=ResNet18Config)
    data: DataConfig = field(default_factory=DigitsConfig)
    optimizer: OptimizerConfig = field(default_factory=SGDConfig)
    scheduler: SchedulerConfig = field(default_factory=CosineConfig)
    sync: SyncConfig = field(default_factory=DDPConfig)
    logger: dict[str, LoggerConfig] = field(
        default_factory=lambda: {"tensorboard": TensorBoardConfig(), "jsonl": JsonlConfig()},
        metadata=FREE,
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=FREE)
    ema: EmaConfig = field(default_factory=EmaConfig)
    check: CheckConfig = field(default_factory=CheckConfig, metadata=FREE)

    name: str = field(default=DEFAULT_NAME, metadata=FREE)
    """The run directory is <output_dir>/<name>."""
    output_dir: str = field(default="outputs", metadata=FREE)
    """The folder of run directories."""
    seed: int = field(default=0, metadata=rule("0 to 2^63 - 1", lambda value: 0 <= value < 2**63))
    """Seed of the initial weights, the sample order and the augmentation; 0 to 2^63 - 1."""
    epochs: int = field(default=10, metadata=POSITIVE | FREE)
    """Passes over the training split; the last, incomplete global batch of each pass is dropped."""
    max_steps: int | None = field(default=None, metadata=POSITIVE | FREE)
    """Evaluate, save and stop after this many optimizer steps, counted over all launches; null:
    train all epochs.
    """
    global_batch_size: int = field(default=256, metadata=POSITIVE)
    """Samples per optimizer step over all ranks and gradient accumulation steps."""
    eval_batch_size: int = field(default=1024, metadata=POSITIVE | FREE)
    """Samples per evaluation batch over all ranks; changes speed and memory, never the result."""
    gradient_accumulation_steps: int = field(default=1, metadata=POSITIVE)
    """Forward and backward passes per optimizer step; more of them need less memory."""
    precision: Precision = Precision.auto
    """auto: bf16 if the hardware of every rank multiplies bf16 fast, else fp32."""
    channels_last: bool | str = field(
        default="auto",
        metadata=FREE | rule("auto, true or false", lambda value: value in ("auto", True, False)),
    )
    """Keep images and weights in the memory layout NHWC; auto: true."""
    compile: bool = field(default=False, metadata=FREE)
    """Compile the model with torch.compile: the start is slower, each step is faster."""
    deterministic: bool = field(default=False, metadata=FREE)
    """Use deterministic algorithms only: GPU runs need this to be bitwise equal, CPU runs do not.
    """
    num_threads: int | str = field(
        default="auto",
        metadata=FREE
        | rule("auto or 1 to 1024", lambda value: value == "auto" or value in range(1, 1025)),
    )
    """Threads per rank; auto: usable cores / local ranks, ignoring OMP_NUM_THREADS."""
    device: Device = field(default=Device.auto, metadata=FREE)
    """auto: cuda if there is a GPU, else cpu."""
    backend: Backend = field(default=Backend.auto, metadata=FREE)
    """auto: nccl on cuda, gloo on cpu."""
    timeout_seconds: int = field(
        default=120,
        metadata=FREE
        | rule(f"1 to {WEEK_SECONDS}, a week", lambda value: 0 < value <= WEEK_SECONDS),
    )
    """Time limit, in seconds, of the start and of a collective; a job without progress for half of
    it is ended.
    """
    label_smoothing: float = field(default=0.0, metadata=BELOW_ONE)
    """Share, in [0, 1), of the target that is spread evenly over all classes."""
    max_grad_norm: float | None = field(default=None, metadata=POSITIVE)
    """Gradients whose 2-norm is larger than this are scaled down to it; null: no limit."""
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    """What to do about a loss or gradient that is not finite: stop the run, or skip that update."""
    log_every_steps: int = field(default=20, metadata=POSITIVE | FREE)
    """Optimizer steps between two log entries. The CPU waits for the GPU only for these and once a
    second.
    """
    report: bool = field(default=False, metadata=FREE)
    """Write report.html at the end of a launch, with the scores of the last evaluation."""
    resume: Resume = field(default=Resume.auto, metadata=FREE)
    """auto: resume from the newest checkpoint if there is one; must: fail without one; never: start
    from step 0.
    """

    def __post_init__(self) -> None:
        if self.name == DEFAULT_NAME:  # Hydra has already resolved it in a config that it composed
            self.name = f"{self.data.name}-{self.model.name}-{self.sync.name}"
        check_values(self)
        require(
            self.name not in ("", ".", "..") and "/" not in self.name and self.name.isprintable(),
            f"name={self.name!r} must be one plain name, without /: it is the run's folder in"
            " output_dir",
        )
        require(
            self.output_dir != "",
            "output_dir= is empty: give a folder, for example . for the current one",
        )
        expanded = os.path.expanduser(self.output_dir)
        require(
            expanded[0] != "~",
            f"output_dir={self.output_dir} begins with ~ of an unknown user: give a full path",
        )
        chosen_by_key = {
            group: getattr(self, group) for group in registry.GROUPS if group != "logger"
        }
        chosen_by_key |= {f"logger.{name}": chosen for name, chosen in self.logger.items()}
        for key, chosen in chosen_by_key.items():
            choice = registry.find(key.partition(".")[0], type(chosen))
            require(
                choice is not None and chosen.name == choice.name,
                f"{key}={chosen.name} is not the name under which {type(chosen).__name__} is"
                " registered: leave `name` of a registered class at its default, or register a"
                f" class whose default `name` is {chosen.name}",
            )
        self._check_together()

    @property
    def process_group(self) -> dict[str, Any]:
        """The keyword arguments of the function ``process_group``: device, backend, threads and
        timeout.
        """
        return {
            key: getattr(self, key)
            for key in ("device", "backend", "num_threads", "timeout_seconds")
        }

    def _check_together(self) -> None:
        sync = self.sync
        require(
            self.global_batch_size >= self.gradient_accumulation_steps,
            f"gradient_accumulation_steps={self.gradient_accumulation_steps} must be at most "
            f"global_batch_size={self.global_batch_size}",
        )
        require(
            self.scheduler.warmup_epochs <= self.epochs,
            f"scheduler.warmup_epochs={self.scheduler.warmup_epochs} must be at most"
            f" epochs={self.epochs}",
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
            self.ema.decay is None or sync.supports_ema,
            f"ema.decay={self.ema.decay} needs parameters that are equal on all ranks after each"
            f" step, and sync={sync.name} does not keep them equal: use sync=ddp, or"
            " ema.decay=null",
        )
        require(
            self.check.every_steps is None or sync.supports_check,
            f"check.every_steps={self.check.every_steps} compares the gradients of ranks, and"
            f" sync={sync.name} has several replicas in one process: use sync=ddp, or"
            " check.every_steps=null",
        )
        require(
            self.precision is not Precision.fp16 or sync.supports_fp16,
            "precision=fp16 needs all gradients on every rank to scale the loss, and with"
            f" sync={sync.name} a rank has only its own: use precision=bf16, or sync=ddp",
        )
        require(
            (self.precision is not Precision.bf16 or sync.supports_bf16)
            and (not self.compile or sync.supports_compile),
            f"sync={sync.name} runs the model in threads, where bf16 autocast and a compiled model"
            " do not work: use precision=fp32 and compile=false, or sync=ddp",
        )

    def check_world_size(self, world_size: int) -> None:
        """Check the world size; ConfigError if a rank has too few samples, or the strategy is for
        one process.
        """
        require(
            self.global_batch_size >= world_size,
            f"global_batch_size={self.global_batch_size} must be at least the world size,"
            f" {world_size}: each rank needs a sample: raise global_batch_size, or start fewer"
            " ranks",
        )
        share = self.global_batch_size // world_size
        require(
            self.gradient_accumulation_steps <= share,
            f"gradient_accumulation_steps={self.gradient_accumulation_steps} must be at most the"
            f" {share} samples of a rank: lower it, or raise"
            f" global_batch_size={self.global_batch_size}",
        )
        self.sync.check_world_size(world_size)
