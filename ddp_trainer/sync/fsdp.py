"""Fully sharded data parallelism: a rank keeps 1/W of all parameters, gradients and moments.

torch's FSDP2 does the work. Before a block of layers computes, the ranks gather its parameters
(all-gather), which they free afterwards. Backward gathers them once more; then each rank receives
its part of the mean gradient (reduce-scatter) and updates its part of the parameters. This strategy
shows that memory can be paid for with communication: for m bytes of parameters in blocks, a rank
sends 3·(W − 1)/W·m bytes in each step, and 2·(W − 1)/W·m with an all-reduce. With Adam, a rank
keeps 4·m/W bytes in place of 4·m, and for a moment the parameters and gradients of one block.

Checkpoints have whole tensors, so that a run can be continued with another strategy.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
2020 (arXiv 1910.02054); Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel, 2023 (arXiv 2304.11277).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.distributed.world import World, waiting
from ddp_trainer.sync.sharded import ShardedSync, exchange_parts, local_part

# torch 2.14 renamed both, and warns about the old names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MIN_ELEMENTS = 2**18
"""The minimum number of parameters of a block, which are gathered together."""


class FSDPSync(ShardedSync):
    """Shards a model by torch's FSDP2; the optimizer gets this rank's parts, as plain tensors."""

    def shard(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Shard all parameters: those of each block, and then all others, are gathered together.

        Raises:
            ConfigError: FSDP2 cannot shard the model, for example because of a scalar parameter.
        """
        named = list(model.named_parameters(remove_duplicate=False))
        self.rows = {name: len(parameter) if parameter.ndim else 1 for name, parameter in named}
        for _, parameter in named:
            parameter.data = parameter.data.contiguous()  # FSDP2 needs this order of memory
        group: Any = self.world.group or dist.group.WORLD
        mesh = DeviceMesh.from_group(group, self.world.device.type)
        try:
            modules = [fully_shard(module, mesh=mesh) for module in (*blocks(model), model)]
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(f"sync=fsdp cannot shard the model: {error}: use sync=ddp") from error
        all_gather: Any = AllGather(self.world)  # torch exports no base class
        reduce_scatter: Any = ReduceScatter(self.world)
        for module in modules:
            module.set_custom_all_gather(all_gather)
            module.set_custom_reduce_scatter(reduce_scatter)
        return {
            name: nn.Parameter(local_part(parameter), requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }

    def to_own(self, part: Tensor, parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        modules = sharded_modules(model)
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_reshard_after_forward(module is not model, recurse=False)
                module.reshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        for module in sharded_modules(self.model):
            module.set_requires_gradient_sync(False, recurse=False)
        yield
        for module in sharded_modules(self.model):
            module.set_requires_gradient_sync(True, recurse=False)

    def before_step(self) -> None:
        """Move the gradients, of which backward has left this rank's parts, to the optimizer's."""
        for name, parameter in self.model.named_parameters():
            if name in self.rows and parameter.grad is not None:
                self.parameters[name].grad = local_part(parameter.grad)
                parameter.grad = None


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of `model` whose parameters are gathered together; none with one rank."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class AllGather:
    """Gathers the parts of all ranks, for FSDP2; on CPUs see `exchange_parts`."""

    def __init__(self, world: World) -> None:
        self.world = world

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @waiting()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        if self.world.device.type == "cuda":
            return ALL_GATHER(output_tensor, input_tensor, **options)
        parts = output_tensor.view(self.world.world_size, -1)
        parts[self.world.rank] = input_tensor
        return exchange_parts([input_tensor] * len(parts), list(parts), self.world)


class ReduceScatter(AllGather):
    """Sums or averages parts over ranks, for FSDP2; each rank gets the result of its own part."""

    @waiting()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        if self.world.device.type == "cuda":
            return REDUCE_SCATTER(output_tensor, input_tensor, **options)
        parts = input_tensor.view(self.world.world_size, -1)
        received = torch.empty_like(parts)
        received[self.world.rank] = parts[self.world.rank]
        exchange_parts(list(parts), list(received), self.world)
        function = torch.mean if options["op"] == dist.ReduceOp.AVG else torch.sum
        return function(received, 0, out=output_tensor)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of nn.Sequential and nn.ModuleList with `MIN_ELEMENTS` parameters.

    A parameter counts for the innermost one; inner modules come first. Members are called as
    modules, which FSDP2 needs; torch's attention, for example, uses a layer's weights without it.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module, *, is_member: bool) -> int:
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        for child in module.children():
            size += visit(child, is_member=isinstance(module, nn.Sequential | nn.ModuleList))
        if size < MIN_ELEMENTS or not is_member or isinstance(module, nn.ModuleList):
            return size
        found.append(module)
        return 0

    visit(model, is_member=False)
    return found
