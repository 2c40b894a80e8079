"""The group sync."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from ddp_trainer.schemas.rules import RULES, require, require_positive


class CommHook(Enum):
    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    powersgd = "powersgd"


class Bucket(Enum):
    parameter = "parameter"
    flat = "flat"


@dataclass(kw_only=True, slots=True)
class SyncConfig:
    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class NoSyncConfig(SyncConfig):
    name: str = "none"


CAPS_MB = (25, 4)
BUCKETS = 8
"""auto takes the largest cap that makes so many buckets: fewer hide too little, more cost a message each."""


@dataclass(kw_only=True, slots=True)
class DDPConfig(SyncConfig):
    name: str = "ddp"
    bucket_cap_mb: int | str = "auto"
    """Gradients travel in buckets of this many MiB, the first while backward still runs; auto: by the model's size."""
    comm_hook: CommHook = CommHook.none
    """How gradients travel: none as they are; fp16 and bf16 rounded; powersgd as factors of low rank."""
    powersgd_rank: int = 2
    """Rank of powersgd's factors; more is closer to the gradient."""
    powersgd_warmup_steps: int = 100
    """Backward passes of each launch, its two throw-away ones among them, before powersgd begins to compress."""

    def __post_init__(self) -> None:
        require(
            self.bucket_cap_mb == "auto" or (isinstance(self.bucket_cap_mb, int) and self.bucket_cap_mb > 0),
            f"sync.bucket_cap_mb={self.bucket_cap_mb} must be {RULES['sync.bucket_cap_mb']}",
        )
        require_positive("sync.powersgd_rank", self.powersgd_rank)
        require(
            self.powersgd_warmup_steps >= 2,
            f"sync.powersgd_warmup_steps={self.powersgd_warmup_steps} must be at least 2",
        )

    def cap_mb(self, gradient_bytes: float) -> int:
        """Return the size of a bucket in MiB for a model with so many bytes of gradients.

        auto is a function of the model alone: buckets decide the order of sums, and a run that is to resume bit by bit
        needs the same. powersgd has one bucket: each sends three messages, two of them from callbacks, which gloo runs
        when a message has come, so that ranks could order the messages of two buckets differently.
        """
        if self.comm_hook is CommHook.powersgd:
            return int(gradient_bytes / 2**20) + 1
        if isinstance(self.bucket_cap_mb, int):
            return self.bucket_cap_mb
        return next((cap for cap in CAPS_MB if gradient_bytes >= BUCKETS * cap * 2**20), CAPS_MB[-1])


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
