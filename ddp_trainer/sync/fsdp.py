"""Fully sharded data parallelism: a rank keeps 1/W of all parameters, gradients and moments.

torch's FSDP2 does the work. Before a block of layers computes, the ranks gather its parameters
(all-gather), which they free afterwards. Backward gathers them once more; then each rank receives
its part of the mean gradient (reduce-scatter) and updates its part of the parameters. This strategy
shows that memory can be paid for with communication: for m bytes of parameters, a rank sends
3·(W − 1)/W·m bytes in each step, and 2·(W − 1)/W·m with an all-reduce. With Adam, a rank keeps
4·m/W bytes in place of 4·m, and for a moment the parameters and gradients of one block.

Checkpoints have whole tensors, so that a run can be continued with another strategy.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
2020 (arXiv 1910.02054); Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel, 2023 (arXiv 2304.11277).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.distributed.world import waiting
from ddp_trainer.sync.base import GradientSync

MIN_ELEMENTS = 2**18
"""The minimum number of parameters of a block, which are gathered together."""


class FSDPSync(GradientSync):
    """Shards a model by torch's FSDP2; the optimizer gets this rank's parts, as plain tensors."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model`, in which sharded parameters replace the parameters, if there are ranks.

        Raises:
            ConfigError: FSDP2 cannot shard the model, for example because of a scalar parameter.
        """
        self.model = model
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.parts: dict[str, nn.Parameter] = {}
        self.modules = self.shard(model)
        return model

    def attach(self, optimizer: Optimizer, average: nn.Module | None) -> None:
        if not self.modules:
            return
        if average is not None:
            self.shard(average)
        self.parts = {
            name: nn.Parameter(local_part(parameter), requires_grad=parameter.requires_grad)
            for name, parameter in self.model.named_parameters()
        }
        new = {old: self.parts[name] for old, name in self.names.items()}
        for group in optimizer.param_groups:
            group["params"] = [new[old] for old in group["params"]]
        for old, values in list(optimizer.state.items()):
            del optimizer.state[old]
            optimizer.state[new[old]] = self.split(values)
        self.names.clear()  # else the whole parameters would stay in memory
        optimizer.register_load_state_dict_pre_hook(self.split_optimizer_state)

    def shard(self, model: nn.Module) -> list[FSDPModule]:
        """Shard the parameters of `model`, and let its state dicts have whole tensors. Collective.

        Returns the modules whose parameters are gathered together: blocks, and then `model` with
        all others; none with one rank. Buffers stay as they are.
        """
        if self.world.world_size == 1:
            return []
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP2 needs this order of memory
        group: Any = self.world.group or dist.group.WORLD
        mesh = DeviceMesh.from_group(group, self.world.device.type)
        try:
            modules = [fully_shard(module, mesh=mesh) for module in (*blocks(model), model)]
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(f"sync=fsdp cannot shard the model: {error}: use sync=ddp") from error
        # FSDP2 wants subclasses of classes that torch does not export.
        all_gather: Any = Marked("all_gather_single", "all_gather_into_tensor")
        reduce_scatter: Any = Marked("reduce_scatter_single", "reduce_scatter_tensor")
        for module in modules:
            module.set_custom_all_gather(all_gather)
            module.set_custom_reduce_scatter(reduce_scatter)
        model.register_state_dict_post_hook(gather_state)
        model.register_load_state_dict_pre_hook(self.split_state)
        return modules

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
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
        for module in self.modules:
            module.set_requires_gradient_sync(False)
        yield
        for module in self.modules:
            module.set_requires_gradient_sync(True)

    def before_step(self) -> None:
        """Move the gradients, of which backward has left this rank's parts, to the optimizer's."""
        for name, parameter in self.model.named_parameters():
            if self.modules and parameter.grad is not None:
                self.parts[name].grad = local_part(parameter.grad)
                parameter.grad = None

    def gradient_norm(self, model: nn.Module) -> Tensor:
        if not self.modules:
            return super().gradient_norm(model)
        nothing = torch.zeros(1, device=self.world.device)  # all parts may be empty
        parts = [part.grad for part in self.parts.values() if part.grad is not None]
        norm = nn.utils.get_total_norm([nothing, *parts])
        return self.world.all_reduce(norm.square()).sqrt()

    def kept_tensors(self, model: nn.Module) -> list[Tensor]:
        return [local_part(tensor) for tensor in (*model.parameters(), *model.buffers())]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state with whole tensors. Collective."""
        whole = optimizer.state_dict()
        if not self.modules:
            return whole
        sharded = dict(zip(self.parts.values(), self.model.parameters(), strict=True))
        parameters = [part for group in optimizer.param_groups for part in group["params"]]
        state = {
            index: {
                name: whole_tensor(value, sharded[parameters[index]]) if value.ndim else value
                for name, value in values.items()
            }
            for index, values in whole["state"].items()
        }
        return whole | {"state": state}

    def split_optimizer_state(self, _: Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
        """Return a state of the optimizer with this rank's parts of the tensors of `whole`."""
        state = {index: self.split(values) for index, values in whole["state"].items()}
        return whole | {"state": state}

    def split(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of the moments of a parameter, and its step count."""
        return {name: self.part(value) if value.ndim else value for name, value in values.items()}

    def split_state(self, model: nn.Module, state: dict[str, Any], *_: Any) -> None:
        """Replace the parameters in `state`, which are whole, by sharded tensors."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = sharded_tensor(self.part(state[name]), parameter)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor: rows, [0 or more, …], as FSDP2 splits them."""
        chunks = whole.to(self.world.device).chunk(self.world.world_size)
        own = chunks[self.world.rank] if self.world.rank < len(chunks) else whole[:0]
        return own.clone(memory_format=torch.contiguous_format)  # not a view of the whole


class Marked:
    """A collective for FSDP2, during which this rank is marked as waiting for others.

    names: the function in ``torch.distributed``; the second name is that before torch 2.14.
    """

    def __init__(self, *names: str) -> None:
        self.collective: Callable[..., Any] = next(
            getattr(dist, name) for name in names if hasattr(dist, name)
        )

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @waiting()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        return self.collective(output_tensor, input_tensor, **options)


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


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, with the same memory, or `tensor` itself."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def sharded_tensor(part: Tensor, like: Tensor) -> DTensor:
    """Return the tensor of which this rank has `part`, sharded as `like`."""
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


@waiting()
def whole_tensor(part: Tensor, like: Tensor) -> Tensor:
    """Return the whole tensor of which this rank has `part`, sharded as `like`. Collective."""
    return sharded_tensor(part, like).full_tensor()


def gather_state(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    """Replace the sharded tensors in `state` by whole ones. Collective."""
    for name, value in state.items():
        if isinstance(value, DTensor):
            with waiting():
                state[name] = value.full_tensor()
