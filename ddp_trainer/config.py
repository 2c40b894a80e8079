"""What can be configured: typed schemas, their rules, and where the YAML groups live.

Imports no torch, so that ``--help``, completion and a mistyped key answer at once.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from ddp_trainer.schemas.data import (
    AugmentConfig,
    DataConfig,
    DigitsConfig,
    FashionMnistConfig,
    SyntheticConfig,
    check_crop,
)
from ddp_trainer.schemas.models import (
    LeNetConfig,
    LeNetInit,
    ModelConfig,
    ResNet18Config,
    Stem,
)
from ddp_trainer.schemas.optim import (
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    LAMBConfig,
    LARSConfig,
    OneCycleConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
    StepConfig,
    check_betas,
)
from ddp_trainer.schemas.rules import (
    RULES,
    ConfigError,
    flatten,
    require,
    require_positive,
)
from ddp_trainer.schemas.sync import (
    AllReduceConfig,
    Bucket,
    CommHook,
    DataParallelConfig,
    DDPConfig,
    LocalSGDConfig,
    NoSyncConfig,
    ParameterServerConfig,
    ReplicasConfig,
    RingConfig,
    SyncConfig,
)

__all__ = [
    "RULES",
    "SCHEMAS",
    "AdamWConfig",
    "AllReduceConfig",
    "AugmentConfig",
    "Backend",
    "Bucket",
    "CheckpointConfig",
    "CommHook",
    "Config",
    "ConfigError",
    "ConstantConfig",
    "CosineConfig",
    "DDPConfig",
    "DataConfig",
    "DataParallelConfig",
    "Device",
    "DigitsConfig",
    "FashionMnistConfig",
    "LAMBConfig",
    "LARSConfig",
    "LeNetConfig",
    "LeNetInit",
    "LocalSGDConfig",
    "ModelConfig",
    "NoSyncConfig",
    "OnNonfinite",
    "OneCycleConfig",
    "OptimizerConfig",
    "ParameterServerConfig",
    "Precision",
    "ReplicasConfig",
    "ResNet18Config",
    "Resume",
    "RingConfig",
    "SGDConfig",
    "SchedulerConfig",
    "Stem",
    "StepConfig",
    "SyncConfig",
    "SyntheticConfig",
    "check_betas",
    "check_crop",
    "config_dir",
    "flatten",
    "register_configs",
    "require",
    "require_positive",
]


class Precision(Enum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Backend(Enum):
    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class Resume(Enum):
    auto = "auto"
    never = "never"
    must = "must"


class OnNonfinite(Enum):
    stop = "stop"
    skip = "skip"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int | None = None
    """Save after each so many optimizer steps, besides each epoch's end; null: epoch ends only."""
    every_seconds: float | None = None
    """Save when so much time has passed since the last save, by rank 0's clock; null: never."""
    keep_last: int = 3
    """How many step checkpoints stay on disk."""
    keep_best: bool = True
    """Keep the checkpoint of the highest eval/top1 as best.pt."""

    def __post_init__(self) -> None:
        for key in ("every_steps", "every_seconds", "keep_last"):
            require_positive(f"checkpoint.{key}", getattr(self, key))


@dataclass(kw_only=True, slots=True)
class Config:
    """One training run. Batch sizes are global: the share of a rank is derived from them."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    scheduler: SchedulerConfig = MISSING
    sync: SyncConfig = MISSING
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    name: str = "${data.name}-${model.name}-${sync.name}"
    """The run directory is <output_dir>/<name>."""
    output_dir: str = "outputs"
    """Where run directories are made."""
    seed: int = 0
    """Of the first weights, the order of samples and augmentation; 0 to 2^63 - 1."""
    epochs: int = 10
    """Passes over the training split, each less what does not fill a global batch."""
    max_steps: int | None = None
    """End the launch at this many optimizer steps in all, evaluated and saved; null: train all epochs."""
    global_batch_size: int = 256
    """Samples per optimizer step over all ranks and microbatches."""
    eval_batch_size: int = 1024
    """Samples per evaluation batch over all ranks; changes speed and memory, never the result."""
    num_microbatches: int = 1
    """Forward/backward passes per optimizer step; more of them need less memory."""
    precision: Precision = Precision.auto
    """auto: bf16 where the hardware of every rank multiplies it, else fp32."""
    channels_last: bool | str = "auto"
    """Memory layout NHWC; auto: true."""
    compile: bool = False
    """torch.compile the model: slower to start, faster a step."""
    deterministic: bool = False
    """Only algorithms that repeat bitwise; a CPU run does without."""
    num_threads: int | str = "auto"
    """Threads per rank; auto: usable cores / local ranks, whatever OMP_NUM_THREADS says."""
    device: Device = Device.auto
    """auto: cuda where there is one."""
    backend: Backend = Backend.auto
    """auto: nccl on cuda, gloo on cpu."""
    timeout_seconds: int = 120
    """How long a collective may take before the job is ended."""
    label_smoothing: float = 0.0
    """Share, in [0, 1), of the target that is spread evenly over all classes."""
    max_grad_norm: float | None = None
    """Gradients are scaled down to this norm; null: never."""
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    """What to do about a loss or gradient that is not finite: stop the run, or skip that update."""
    log_every_steps: int = 20
    """Optimizer steps between two log points; there, and once a second, does the host wait for the device."""
    resume: Resume = Resume.auto
    """auto: go on from the newest checkpoint if there is one; must: there has to be one; never: start afresh."""

    def __post_init__(self) -> None:
        for key in (
            "epochs",
            "max_steps",
            "global_batch_size",
            "eval_batch_size",
            "num_microbatches",
            "timeout_seconds",
            "max_grad_norm",
            "log_every_steps",
        ):
            require_positive(key, getattr(self, key))
        for key, allowed in (("num_threads", range(1, 1025)), ("channels_last", (True, False))):
            value = getattr(self, key)
            require(value == "auto" or (value in allowed), f"{key}={value} must be {RULES[key]}")
        require(0 <= self.label_smoothing < 1, f"label_smoothing={self.label_smoothing} must be in [0, 1)")
        require(0 <= self.seed < 2**63, f"seed={self.seed} must be 0 to 2^63 - 1")
        for key, value in flatten(asdict(self)).items():
            numbers = value if isinstance(value, list) else [value]
            finite = all(math.isfinite(number) for number in numbers if isinstance(number, float))
            require(finite, f"{key}={value} must be finite")
        self._check_names()
        self._check_together()

    def _check_names(self) -> None:
        require(
            self.name not in ("", ".", "..") and "/" not in self.name,
            f"name={self.name} becomes the run's folder in output_dir: it must be one plain name, without /",
        )
        require(self.output_dir != "", "output_dir= is empty: name a folder, . is this one")
        for group, choices in SCHEMAS.items():
            chosen, example = getattr(self, group), next(iter(choices))
            require(
                type(chosen) not in (ModelConfig, DataConfig, OptimizerConfig, SchedulerConfig, SyncConfig),
                f"{group}={chosen.name} has no schema: begin its YAML with defaults: [{example}_schema, _self_]",
            )
            own_name = next((name for name, schema in choices.items() if schema is type(chosen)), chosen.name)
            require(
                chosen.name == own_name,
                f"{group}.name={chosen.name} must stay {own_name}: to choose another write {group}={chosen.name}",
            )

    def _check_together(self) -> None:
        require(
            self.global_batch_size >= self.num_microbatches,
            f"num_microbatches={self.num_microbatches} must be at most global_batch_size={self.global_batch_size}",
        )
        require(
            self.scheduler.warmup_epochs <= self.epochs,
            f"scheduler.warmup_epochs={self.scheduler.warmup_epochs} must be at most epochs={self.epochs}",
        )
        require(
            self.backend is not Backend.nccl or self.device is not Device.cpu,
            "backend=nccl serves GPUs and device=cpu: use backend=gloo, or device=cuda",
        )
        require(
            self.on_nonfinite is OnNonfinite.stop or isinstance(self.optimizer, SGDConfig | AdamWConfig),
            f"on_nonfinite=skip is for fused optimizers and optimizer={self.optimizer.name} is none: use sgd or adamw, "
            "or on_nonfinite=stop",
        )
        require(
            self.precision is not Precision.fp16 or not isinstance(self.sync, ParameterServerConfig | LocalSGDConfig),
            f"precision=fp16 scales the loss by what all gradients are, and sync={self.sync.name} shows a rank only "
            "its own: use precision=bf16, or sync=ddp",
        )
        require(
            not isinstance(self.sync, DataParallelConfig)
            or (self.precision is not Precision.bf16 and not self.compile),
            "sync=data_parallel runs copies of the model in threads, where neither bf16 nor what was compiled gets to: "
            "use precision=fp32 and compile=false, or sync=ddp",
        )

    def check_world_size(self, world_size: int) -> None:
        """Check what depends on the number of ranks; before they meet, so that none waits for the others.

        Raises:
            ConfigError: a rank would have too few samples, or the strategy is for one process.
        """
        require(
            self.global_batch_size >= world_size,
            f"global_batch_size={self.global_batch_size} must be at least the number of ranks, {world_size}: "
            "each needs a sample, so raise it or start fewer",
        )
        share = self.global_batch_size // world_size
        require(
            self.num_microbatches <= share,
            f"num_microbatches={self.num_microbatches} must be at most the {share} samples of a rank: "
            f"lower it, or raise global_batch_size={self.global_batch_size}",
        )
        require(
            world_size == 1 or not isinstance(self.sync, NoSyncConfig | ReplicasConfig | DataParallelConfig),
            f"sync={self.sync.name} is for one process and there are {world_size} ranks: use sync=ddp, or start one "
            f"process, python -m ddp_trainer sync={self.sync.name}",
        )
        if isinstance(self.sync, ParameterServerConfig):
            require(
                self.sync.num_servers <= world_size,
                f"sync.num_servers={self.sync.num_servers} must be at most the number of ranks, {world_size}",
            )


SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"resnet18": ResNet18Config, "lenet": LeNetConfig},
    "data": {"digits": DigitsConfig, "fashion_mnist": FashionMnistConfig, "synthetic": SyntheticConfig},
    "optimizer": {"sgd": SGDConfig, "adamw": AdamWConfig, "lars": LARSConfig, "lamb": LAMBConfig},
    "scheduler": {
        "constant": ConstantConfig,
        "step": StepConfig,
        "cosine": CosineConfig,
        "onecycle": OneCycleConfig,
    },
    "sync": {
        "ddp": DDPConfig,
        "none": NoSyncConfig,
        "allreduce": AllReduceConfig,
        "ring": RingConfig,
        "parameter_server": ParameterServerConfig,
        "local_sgd": LocalSGDConfig,
        "replicas": ReplicasConfig,
        "data_parallel": DataParallelConfig,
    },
}


def register_configs() -> None:
    """Make the schemas known to Hydra as ``config_schema`` and ``<group>/<choice>_schema``."""
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    for group, choices in SCHEMAS.items():
        for choice, schema in choices.items():
            store.store(group=group, name=f"{choice}_schema", node=schema)


def config_dir() -> Path:
    """Return the folder of the YAML groups: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"conf/config.yaml is neither in {package} nor beside it: reinstall ddp_trainer")
