"""`ShardedSync`, the base class of strategies with which a rank keeps only parts of parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_trainer.distributed.world import World
from ddp_trainer.sync.base import GradientSync


class ShardedSync(GradientSync):
    """Keeps parts of parameters: rows of their first dimension, split as ``torch.chunk`` does.

    State dicts of the model and of the optimizer have whole tensors, so that a checkpoint is that
    of any other strategy.
    """

    def __init__(self, config: Any, world: World) -> None:
        super().__init__(config, world)
        self.rows: dict[str, int] = {}
        """The number of rows of each sharded parameter, over all ranks, by the parameter's name."""
        self.shard_world = world
        """The ranks that have the parts of a parameter."""

    def shard(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Shard parameters of `model`, and fill `rows`; return what the optimizer updates, by name.

        Subclasses must override this. Called for each model if there are several ranks. Collective.
        """
        raise NotImplementedError

    def to_own(self, part: Tensor, parameter: Tensor) -> Tensor:
        """Return `part` in the form that ``load_state_dict`` copies to the model's `parameter`."""
        return part

    def wrap(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.parameters = self.shard_with_state(model)
        return model

    def shard_with_state(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the result of `shard`, after which state dicts of `model` have whole tensors."""
        if self.world.world_size == 1:
            return dict(model.named_parameters())
        parameters = self.shard(model)
        model.register_state_dict_post_hook(partial(self.gather_state))
        model.register_load_state_dict_pre_hook(partial(self.split_state))
        return parameters

    def attach(self, optimizer: Optimizer, average: nn.Module | None) -> None:
        if average is not None:
            self.shard_with_state(average)
        new = {old: self.parameters[name] for old, name in self.names.items()}
        names = {self.parameters[name]: name for name in self.names.values()}
        for group in optimizer.param_groups:
            group["params"] = [new[old] for old in group["params"]]
        for old, values in list(optimizer.state.items()):
            del optimizer.state[old]
            optimizer.state[new[old]] = self.split(names[new[old]], values)
        order = [names[part] for group in optimizer.param_groups for part in group["params"]]
        self.order = dict(enumerate(order))
        self.names.clear()  # else the whole parameters would stay in memory
        optimizer.register_load_state_dict_pre_hook(self.split_optimizer_state)

    def gradient_norm(self, model: nn.Module) -> Tensor:
        nothing = torch.zeros(1, device=self.world.device)  # there may be no gradient of a kind
        parts = [nothing]
        others = [nothing]
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                (parts if name in self.rows else others).append(parameter.grad)
        square = self.shard_world.all_reduce(nn.utils.get_total_norm(parts).square())
        return (square + nn.utils.get_total_norm(others).square()).sqrt()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state with whole tensors. Collective."""
        whole = optimizer.state_dict()
        state = {
            index: {key: self.gather(self.order[index], value) for key, value in values.items()}
            for index, values in whole["state"].items()
        }
        return whole | {"state": state}

    def split_optimizer_state(self, _: Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
        """Return a state of the optimizer with this rank's parts of the tensors of `whole`."""
        state = {
            index: self.split(self.order[index], values) for index, values in whole["state"].items()
        }
        return whole | {"state": state}

    def gather_state(self, _: nn.Module, state: dict[str, Any], *__: Any) -> None:
        """Replace the parts in a state dict of a model by whole tensors. Collective."""
        for name in self.rows:
            state[name] = self.gather(name, local_part(state[name]))

    def split_state(self, model: nn.Module, state: dict[str, Any], *_: Any) -> None:
        """Replace the whole tensors in a state dict of a model by this rank's parts."""
        for name in self.rows.keys() & state.keys():
            state[name] = self.to_own(self.part(name, state[name]), model.get_parameter(name))

    def kept_tensors(self, model: nn.Module) -> list[Tensor]:
        return [local_part(tensor) for tensor in (*model.parameters(), *model.buffers())]

    def split(self, name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of the moments of a parameter, and its step count as it is."""
        if name not in self.rows:
            return values
        return {
            key: self.part(name, value) if value.ndim else value for key, value in values.items()
        }

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of a parameter, or of a moment; it may be empty."""
        own = whole.split(self.sizes(name))[self.shard_world.rank]
        return own.to(self.world.device, copy=True, memory_format=torch.contiguous_format)

    def gather(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a parameter, or of one of its moments, of which ranks have parts.

        Collective: every rank must call this.
        """
        is_whole = name not in self.rows or not part.ndim
        return part if is_whole else gather_parts(part, self.sizes(name), self.shard_world)

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        parameters = {n: p for n, p in model.named_parameters() if n in self.rows}
        parts = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = self.gather(name, parameter)
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = parts[name]
            torch.clear_autocast_cache()  # it has whole weights in bf16

    def sizes(self, name: str) -> list[int]:
        """Return the number of rows of each rank's part of a parameter."""
        return split_rows(self.rows[name], self.shard_world.world_size)


def split_rows(rows: int, world_size: int) -> list[int]:
    """Return the number of rows of each rank, as ``torch.chunk`` splits them; some may be 0."""
    most = -(-rows // world_size)
    return [min(most, max(0, rows - rank * most)) for rank in range(world_size)]


def gather_parts(part: Tensor, sizes: Sequence[int], world: World, *, dim: int = 0) -> Tensor:
    """Return the parts of all ranks, one after another along `dim`. Collective.

    sizes: the size along `dim` of each rank's part.
    """
    parts: list[Tensor] = []
    for size in sizes:
        shape = list(part.shape)
        shape[dim] = size
        parts.append(part.new_empty(shape))
    parts[world.rank].copy_(part.detach())
    exchange_parts([parts[world.rank]] * len(parts), parts, world)
    return torch.cat(parts, dim)


def exchange_parts(sent: Sequence[Tensor], received: Sequence[Tensor], world: World) -> None:
    """Send a tensor to each other rank, and receive one from each; both are by rank. Collective.

    torch's collectives do the same, but gloo does not send and receive at the same time in them.
    """
    others = [rank for rank in range(world.world_size) if rank != world.rank]
    world.exchange(
        send=[(sent[rank], rank) for rank in others],
        receive=[(received[rank], rank) for rank in others],
    )


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, with the same memory; any other tensor as it is."""
    return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor
