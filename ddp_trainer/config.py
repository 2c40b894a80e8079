"""What can be configured: typed schemas, their rules, and where the YAML groups live.

Imports no torch, so that ``--help``, completion and a mistyped key answer at once.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


class ConfigError(ValueError):
    """The user's input breaks a rule. ``str(error)`` is the whole message: key, value, rule, way out."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_positive(key: str, value: float | None) -> None:
    """Refuse zero and negative values of `key`; None means "not set" and passes."""
    require(value is None or value > 0, f"{key}={value} must be greater than 0")


RULES = {"num_threads": "auto or 1 to 1024", "channels_last": "auto, true or false"}
"""What the keys that take more than one type must be."""


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


class CommHook(Enum):
    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    powersgd = "powersgd"


class Bucket(Enum):
    parameter = "parameter"
    flat = "flat"


class Stem(Enum):
    imagenet = "imagenet"
    small = "small"


class LeNetInit(Enum):
    default = "default"
    notes = "notes"


# --- models -----------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class ResNet18Config(ModelConfig):
    name: str = "resnet18"
    stem: Stem = Stem.small
    """imagenet: 7×7 stride 2 and a max pool; small: 3×3 stride 1, no max pool, for images under 64 pixels."""


@dataclass(kw_only=True, slots=True)
class LeNetConfig(ModelConfig):
    name: str = "lenet"
    init: LeNetInit = LeNetInit.default
    """default: PyTorch's; notes: weights from a normal distribution of standard deviation 0.01."""


# --- data -------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class AugmentConfig:
    crop_padding: int = 0
    """Zero pixels added on each side before a random crop back to the original size; 0: no crop."""
    flip: bool = False
    """Mirror half of the images left to right."""
    erase: float = 0.0
    """Probability in [0, 1] of blanking one random rectangle (2 to 33 % of the area) of an image."""

    def __post_init__(self) -> None:
        require(
            self.crop_padding >= 0,
            f"data.augment.crop_padding={self.crop_padding} must be 0 (no crop) or more pixels",
        )
        require(
            0 <= self.erase <= 1,
            f"data.augment.erase={self.erase} is a probability: choose a value in [0, 1]",
        )


def check_crop(augment: AugmentConfig, *, height: int, width: int) -> None:
    """Refuse a crop that may miss the image altogether.

    Raises:
        ConfigError: the border is as wide as the image or wider.
    """
    require(
        augment.crop_padding < min(height, width),
        f"data.augment.crop_padding={augment.crop_padding} must be smaller than the images of {height}×{width} pixels",
    )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    name: str = MISSING
    mean: list[float] = MISSING
    """Per channel, on pixels scaled to [0, 1]; subtracted after augmentation."""
    std: list[float] = MISSING
    """Per channel; divided by after the mean is subtracted."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        require(
            len(self.mean) == len(self.std) > 0,
            f"data.mean={self.mean} and data.std={self.std} must have one value per channel each",
        )
        require(all(s > 0 for s in self.std), f"data.std={self.std} must be greater than 0 in every channel")


@dataclass(kw_only=True, slots=True)
class DigitsConfig(DataConfig):
    name: str = "digits"


@dataclass(kw_only=True, slots=True)
class FashionMnistConfig(DataConfig):
    name: str = "fashion_mnist"
    root: str | None = None
    """Folder with the four IDX files (gz or not); null: Debian's, else ~/.cache, downloaded once."""


@dataclass(kw_only=True, slots=True)
class SyntheticConfig(DataConfig):
    name: str = "synthetic"
    num_train: int = 4096
    """Training images."""
    num_eval: int = 512
    """Evaluation images."""
    channels: int = 3
    """As many values as mean and std have."""
    height: int = 32
    """Pixels."""
    width: int = 32
    """Pixels."""
    num_classes: int = 10
    """2 to 256."""

    def __post_init__(self) -> None:
        DataConfig.__post_init__(self)
        for key in ("num_train", "num_eval", "channels", "height", "width"):
            require_positive(f"data.{key}", getattr(self, key))
        require(2 <= self.num_classes <= 256, f"data.num_classes={self.num_classes} must be 2 to 256")
        require(
            len(self.mean) == self.channels,
            f"data.mean={self.mean} must have one value per channel, and so must data.std: "
            f"data.channels={self.channels}",
        )
        check_crop(self.augment, height=self.height, width=self.width)


# --- optimizer and scheduler ------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    name: str = MISSING
    lr: float = MISSING
    """Peak learning rate for the global batch as given."""
    weight_decay: float = 0.0
    """sgd: added to the gradient, times the weights; adamw: taken off the weights, times lr."""
    scale_lr: bool = False
    """Linear rule: multiply lr by global_batch_size / base_batch_size."""
    base_batch_size: int = 256
    """The global batch that `lr` was chosen for; read only when scale_lr is on."""

    def __post_init__(self) -> None:
        require_positive("optimizer.lr", self.lr)
        require_positive("optimizer.base_batch_size", self.base_batch_size)
        require(self.weight_decay >= 0, f"optimizer.weight_decay={self.weight_decay} must be 0 or more")

    def scaled_lr(self, global_batch_size: int) -> float:
        """Return the learning rate for `global_batch_size` samples a step."""
        return self.lr * global_batch_size / self.base_batch_size if self.scale_lr else self.lr


@dataclass(kw_only=True, slots=True)
class SGDConfig(OptimizerConfig):
    name: str = "sgd"
    lr: float = 0.1
    """Peak learning rate for the global batch as given."""
    momentum: float = 0.9
    """Share of the former step, in [0, 1), that the next one keeps."""
    nesterov: bool = False
    """Look ahead along the momentum."""

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        require(0 <= self.momentum < 1, f"optimizer.momentum={self.momentum} must be in [0, 1)")
        require(
            not self.nesterov or self.momentum > 0,
            "optimizer.nesterov=true needs momentum: set optimizer.momentum above 0",
        )


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    name: str = "adamw"
    lr: float = 1e-3
    """Peak learning rate for the global batch as given."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Shares, in [0, 1), that the running means of gradients and of their squares keep a step."""
    eps: float = 1e-8
    """Added to the denominator."""

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        require_positive("optimizer.eps", self.eps)
        check_betas(self.betas)


def check_betas(betas: list[float]) -> None:
    """Refuse anything but two shares."""
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        f"optimizer.betas={betas} must be two values in [0, 1)",
    )


@dataclass(kw_only=True, slots=True)
class LARSConfig(OptimizerConfig):
    name: str = "lars"
    lr: float = 5.0
    """Peak learning rate for the global batch as given, before the trust ratio of each layer."""
    momentum: float = 0.9
    """Share of the former step, in [0, 1), that the next one keeps."""
    nesterov: bool = False
    """Look ahead along the momentum."""
    trust_coefficient: float = 0.001
    """Length of a layer's step over the length of its weights, at learning rate 1."""

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        require(0 <= self.momentum < 1, f"optimizer.momentum={self.momentum} must be in [0, 1)")
        require_positive("optimizer.trust_coefficient", self.trust_coefficient)


@dataclass(kw_only=True, slots=True)
class LAMBConfig(OptimizerConfig):
    name: str = "lamb"
    lr: float = 1e-2
    """Peak learning rate for the global batch as given, before the trust ratio of each layer."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Shares, in [0, 1), that the running means of gradients and of their squares keep a step."""
    eps: float = 1e-6
    """Added to the denominator."""

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        require_positive("optimizer.eps", self.eps)
        check_betas(self.betas)


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    name: str = MISSING
    warmup_epochs: float = 0.0
    """Epochs (fractions count) over which the learning rate climbs linearly to its peak."""

    def __post_init__(self) -> None:
        require(self.warmup_epochs >= 0, f"scheduler.warmup_epochs={self.warmup_epochs} must be 0 or more")


@dataclass(kw_only=True, slots=True)
class ConstantConfig(SchedulerConfig):
    name: str = "constant"


@dataclass(kw_only=True, slots=True)
class StepConfig(SchedulerConfig):
    name: str = "step"
    every_epochs: int = 30
    """Epochs between two drops."""
    gamma: float = 0.1
    """Factor of each drop."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require_positive("scheduler.every_epochs", self.every_epochs)
        require_positive("scheduler.gamma", self.gamma)


@dataclass(kw_only=True, slots=True)
class CosineConfig(SchedulerConfig):
    name: str = "cosine"
    final_factor: float = 0.0
    """Learning rate at the last step over the peak, in [0, 1]."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require(0 <= self.final_factor <= 1, f"scheduler.final_factor={self.final_factor} must be in [0, 1]")


@dataclass(kw_only=True, slots=True)
class OneCycleConfig(SchedulerConfig):
    name: str = "onecycle"
    rise: float = 0.3
    """Share of all steps, in (0, 1), spent climbing."""
    initial_factor: float = 0.04
    """Learning rate at the first step over the peak."""
    final_factor: float = 1e-4
    """Learning rate at the last step over the peak."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require(0 < self.rise < 1, f"scheduler.rise={self.rise} must be between 0 and 1")
        require(
            self.warmup_epochs == 0,
            f"scheduler.warmup_epochs={self.warmup_epochs}: onecycle has its own climb, set scheduler.rise instead",
        )
        for key in ("initial_factor", "final_factor"):
            require(0 <= getattr(self, key) <= 1, f"scheduler.{key}={getattr(self, key)} must be in [0, 1]")


# --- synchronisation --------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class SyncConfig:
    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class NoSyncConfig(SyncConfig):
    name: str = "none"


@dataclass(kw_only=True, slots=True)
class DDPConfig(SyncConfig):
    name: str = "ddp"
    bucket_cap_mb: int = 25
    """Gradients travel in buckets of this many MiB, the first while backward still runs."""
    comm_hook: CommHook = CommHook.none
    """How gradients travel: none as they are; fp16 and bf16 rounded; powersgd as factors of low rank."""
    powersgd_rank: int = 2
    """Rank of powersgd's factors; more is closer to the gradient."""
    powersgd_warmup_steps: int = 100
    """Steps, of each launch, before powersgd begins to compress."""

    def __post_init__(self) -> None:
        require_positive("sync.bucket_cap_mb", self.bucket_cap_mb)
        require_positive("sync.powersgd_rank", self.powersgd_rank)
        require(
            self.powersgd_warmup_steps >= 2,
            f"sync.powersgd_warmup_steps={self.powersgd_warmup_steps} must be at least 2",
        )


@dataclass(kw_only=True, slots=True)
class AllReduceConfig(SyncConfig):
    name: str = "allreduce"
    bucket: Bucket = Bucket.flat
    """flat: all gradients in one message; parameter: one at a time."""


@dataclass(kw_only=True, slots=True)
class RingConfig(SyncConfig):
    name: str = "ring"


@dataclass(kw_only=True, slots=True)
class ParameterServerConfig(SyncConfig):
    name: str = "parameter_server"
    num_servers: int = 1
    """How many ranks, from 0 on, own parameters besides training; 1 to the number of ranks."""

    def __post_init__(self) -> None:
        require_positive("sync.num_servers", self.num_servers)


@dataclass(kw_only=True, slots=True)
class LocalSGDConfig(SyncConfig):
    name: str = "local_sgd"
    every_steps: int = 8
    """Optimizer steps between two averages; an epoch's end is one too."""

    def __post_init__(self) -> None:
        require_positive("sync.every_steps", self.every_steps)


@dataclass(kw_only=True, slots=True)
class ReplicasConfig(SyncConfig):
    name: str = "replicas"
    devices: list[str] = field(default_factory=lambda: ["cpu", "cpu"])
    """A replica for each; cpu, or cuda:0, cuda:1 and so on."""

    def __post_init__(self) -> None:
        kinds = {device.split(":")[0] for device in self.devices}
        require(
            len(kinds) == 1 and kinds <= {"cpu", "cuda"},
            f"sync.devices={self.devices} must all be cpu, or all be cuda:0, cuda:1 and so on",
        )


@dataclass(kw_only=True, slots=True)
class DataParallelConfig(SyncConfig):
    name: str = "data_parallel"


# --- the whole --------------------------------------------------------------------------------


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
    """auto: bf16 where the hardware multiplies it, else fp32."""
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
    """Optimizer steps between two log points; only there does the host wait for the device."""
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


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"optimizer.lr": 0.1, …}`` from nested dicts."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
