"""The group ``sync``: how the replicas of a model are kept equal."""

import re
from enum import StrEnum
from typing import ClassVar

from omegaconf import MISSING

from ddp_trainer.config.errors import NAMED, POSITIVE, config_class, require, rule, setting
from ddp_trainer.registry import register_sync

DEVICES = rule(
    "a list of cpu, or of cuda:0, cuda:1 and so on",
    lambda names: re.fullmatch(r"(cpu ?)+|(cuda:\d+ ?)+", " ".join(map(str, names))) is not None,
)

BatchNorm = StrEnum("BatchNorm", ["local", "sync"])
CommHook = StrEnum("CommHook", ["none", "fp16", "bf16", "powersgd"])
Bucket = StrEnum("Bucket", ["parameter", "flat"])
Schedule = StrEnum("Schedule", ["gpipe", "1f1b"])


@config_class
class SyncConfig:
    single_process: ClassVar[bool] = False
    """Whether the strategy runs in one process only."""
    averages_gradients: ClassVar[bool] = False
    """Whether a step takes the mean over ranks of all gradients, as other strategies do. A run can
    be continued with another of them.
    """
    point_to_point: ClassVar[bool] = False
    """Whether the strategy sends from rank to rank, which gloo cannot do with tensors on a GPU."""
    supports_fp16: ClassVar[bool] = True
    """Whether every rank has all gradients before the update, as the loss scaling of fp16 needs."""
    supports_ema: ClassVar[bool] = True
    """Whether parameters are equal on all ranks after each step."""
    supports_bf16: ClassVar[bool] = True
    supports_compile: ClassVar[bool] = True
    supports_check: ClassVar[bool] = True
    """Whether a rank has one replica, whose gradient check.every_steps can compute again."""
    shards_parameters: ClassVar[bool] = False
    """Whether a rank updates a part of each parameter, of which it does not have the norm."""
    is_asynchronous: ClassVar[bool] = False
    """Whether ranks do not take steps together."""
    supports_recovery: ClassVar[bool] = False
    """Whether every rank has all parameters and all of the optimizer's state, and no other state
    that would be lost with a rank.
    """

    name: str = MISSING

    def check_world_size(self, world_size: int) -> None:
        """Check that the strategy can run on `world_size` ranks; ConfigError if it cannot."""
        require(
            world_size == 1 or not self.single_process,
            f"sync={self.name} runs in one process only, and there are {world_size} ranks: use"
            f" sync=ddp, or start one process, python -m ddp_trainer sync={self.name}",
        )

    def batch_unit(self, world_size: int, microbatches: int) -> int:
        """Return a number of which the global batch size must be a multiple.

        microbatches: how many a rank has in a step.
        """
        return 1


@config_class
class NoSyncConfig(SyncConfig):
    name: str = "none"
    averages_gradients: ClassVar[bool] = True
    single_process: ClassVar[bool] = True


@config_class
class DDPConfig(SyncConfig):
    name: str = "ddp"
    averages_gradients: ClassVar[bool] = True
    supports_recovery: ClassVar[bool] = True
    bucket_cap_mb: int | str = setting(
        "auto",
        NAMED
        | rule(
            "auto or 1 to 1048576", lambda value: value == "auto" or value in range(1, 2**20 + 1)
        ),
    )
    """Size in MiB of the gradient buckets that DDP sends during backward; auto: by model size."""
    batch_norm: BatchNorm = BatchNorm.local
    """The batch whose statistics BatchNorm uses; local: that of its rank; sync: that of all ranks,
    so that the result does not depend on the number of ranks, except for rounding errors.
    """
    comm_hook: CommHook = CommHook.none
    """How gradients are sent: none: unchanged; fp16, bf16: rounded; powersgd: low-rank factors."""
    powersgd_rank: int = setting(2, POSITIVE)
    """Rank of powersgd's factors; a higher rank approximates the gradient better."""
    powersgd_warmup_steps: int = setting(100, rule("at least 2", lambda value: value >= 2))
    """Number of uncompressed gradient averages as a launch starts; two of them precede step 1."""

    def cap_mb(self, gradient_bytes: float) -> int:
        """Return the size of a bucket in MiB for a model with `gradient_bytes` of gradients.

        With bucket_cap_mb=auto the size depends on the model alone: buckets determine the order in
        which gradients are summed, and this order must not change if a resumed run is to be bitwise
        equal. With comm_hook=powersgd all gradients are in one bucket: each bucket sends three
        messages, two of them from callbacks that gloo runs when a message arrives, so that with two
        buckets the order of the messages could differ between ranks.
        """
        if self.comm_hook is CommHook.powersgd:
            return int(gradient_bytes / 2**20) + 1
        if isinstance(self.bucket_cap_mb, int):
            return self.bucket_cap_mb
        # because fewer than 8 buckets overlap less communication with backward
        return 25 if gradient_bytes >= 8 * 25 * 2**20 else 4


@config_class
class AllReduceConfig(SyncConfig):
    name: str = "allreduce"
    averages_gradients: ClassVar[bool] = True
    supports_recovery: ClassVar[bool] = True
    bucket: Bucket = Bucket.flat
    """flat: all gradients in one message; parameter: one message for each parameter's gradient."""


@config_class
class RingConfig(SyncConfig):
    name: str = "ring"
    averages_gradients: ClassVar[bool] = True
    supports_recovery: ClassVar[bool] = True
    point_to_point: ClassVar[bool] = True


@config_class
class ParameterServerConfig(SyncConfig):
    name: str = "parameter_server"
    averages_gradients: ClassVar[bool] = True
    point_to_point: ClassVar[bool] = True
    supports_fp16: ClassVar[bool] = False
    num_servers: int = setting(1, POSITIVE | NAMED)
    """Number of ranks, from rank 0 on, that own parameters and also train; 1 to the world size."""

    def check_world_size(self, world_size: int) -> None:
        require(
            self.num_servers <= world_size,
            f"sync.num_servers={self.num_servers} must be at most the world size, {world_size}",
        )


@config_class
class AsyncParameterServerConfig(SyncConfig):
    name: str = "async_parameter_server"
    point_to_point: ClassVar[bool] = True
    supports_fp16: ClassVar[bool] = False
    supports_ema: ClassVar[bool] = False
    supports_check: ClassVar[bool] = False
    supports_compile: ClassVar[bool] = False
    is_asynchronous: ClassVar[bool] = True
    num_servers: ClassVar[int] = 1
    max_staleness: int = setting(4, rule("0 to 64", lambda value: value in range(65)))
    """Maximum number of updates between the parameters of a gradient and the update that uses it;
    0: ranks wait for each other, as with sync=parameter_server, and the result is the same.
    """
    scale_by_staleness: bool = False
    """Whether a gradient is divided by its staleness + 1."""

    def batch_unit(self, world_size: int, microbatches: int) -> int:
        return world_size  # because a rank may take the share of another


@config_class
class ShardedConfig(SyncConfig):
    """The base class of strategies with which a rank keeps parts of parameters."""

    point_to_point: ClassVar[bool] = True
    shards_parameters: ClassVar[bool] = True
    supports_fp16: ClassVar[bool] = False
    supports_check: ClassVar[bool] = False
    supports_compile: ClassVar[bool] = False


@config_class
class FSDPConfig(ShardedConfig):
    name: str = "fsdp"
    averages_gradients: ClassVar[bool] = True


@config_class
class ChannelParallelConfig(ShardedConfig):
    name: str = "channel_parallel"


@config_class
class PipelineConfig(ShardedConfig):
    name: str = "pipeline"
    averages_gradients: ClassVar[bool] = True
    shards_parameters: ClassVar[bool] = False
    num_stages: int = setting(2, NAMED | rule("at least 2", lambda value: value >= 2))
    """Number of stages into which the model is cut; each pipeline has as many ranks."""
    schedule: Schedule = setting(Schedule["1f1b"], NAMED)
    """The order of a stage's passes; gpipe: all forward passes first; 1f1b: backward passes as soon
    as they can be, so that a rank keeps the activations of fewer microbatches.
    """

    def check_world_size(self, world_size: int) -> None:
        more = -(-world_size // self.num_stages) * self.num_stages
        require(
            world_size % self.num_stages == 0,
            f"sync.num_stages={self.num_stages} needs a multiple of {self.num_stages} ranks, not"
            f" {world_size}: start {more} ranks, or use sync=ddp",
        )

    def batch_unit(self, world_size: int, microbatches: int) -> int:
        return world_size * microbatches  # because all pass the same stages


@config_class
class LocalSGDConfig(SyncConfig):
    name: str = "local_sgd"
    supports_fp16: ClassVar[bool] = False
    supports_ema: ClassVar[bool] = False
    every_steps: int = setting(8, POSITIVE)
    """Optimizer steps between two averages of the parameters; an epoch's end also averages them."""


@config_class
class ReplicasConfig(SyncConfig):
    name: str = "replicas"
    single_process: ClassVar[bool] = True
    supports_check: ClassVar[bool] = False
    devices: list[str] = setting(["cpu", "cpu"], NAMED | DEVICES)
    """The device of each replica: all cpu, or cuda:0, cuda:1 and so on."""


@config_class
class DataParallelConfig(SyncConfig):
    name: str = "data_parallel"
    single_process: ClassVar[bool] = True
    supports_bf16: ClassVar[bool] = False
    supports_check: ClassVar[bool] = False
    supports_compile: ClassVar[bool] = False


register_sync("ddp", DDPConfig, builder="ddp_trainer.sync.ddp:DDPSync")
register_sync("none", NoSyncConfig, builder="ddp_trainer.sync.base:GradientSync")
register_sync("allreduce", AllReduceConfig, builder="ddp_trainer.sync.allreduce:AllReduceSync")
register_sync("ring", RingConfig, builder="ddp_trainer.sync.ring:RingSync")
register_sync(
    "parameter_server",
    ParameterServerConfig,
    builder="ddp_trainer.sync.parameter_server:ParameterServerSync",
)
register_sync(
    "async_parameter_server",
    AsyncParameterServerConfig,
    builder="ddp_trainer.sync.parameter_server:ParameterServerSync",
)
register_sync("fsdp", FSDPConfig, builder="ddp_trainer.sync.fsdp:FSDPSync")
register_sync(
    "channel_parallel",
    ChannelParallelConfig,
    builder="ddp_trainer.sync.channel_parallel:ChannelParallelSync",
)
register_sync("pipeline", PipelineConfig, builder="ddp_trainer.sync.pipeline:PipelineSync")
register_sync("local_sgd", LocalSGDConfig, builder="ddp_trainer.sync.local_sgd:LocalSGDSync")
register_sync("replicas", ReplicasConfig, builder="ddp_trainer.sync.replicas:ReplicasSync")
register_sync(
    "data_parallel", DataParallelConfig, builder="ddp_trainer.sync.data_parallel:DataParallelSync"
)
