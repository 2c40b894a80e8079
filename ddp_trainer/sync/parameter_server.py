"""A sharded parameter server: gradients go to owner ranks, and updated parameters come back.

This strategy shows the cost of a server. With one server, m trained parameters and W ranks, the
network card of the server receives (W − 1)·m elements and then sends as many. With a server on each
rank, this is a reduce-scatter and an all-gather. The strategy also shows that the ``push`` and
``pull`` of a key–value store hide which ranks communicate: the caller names no rank.

Here ranks wait for each other. Those of `ddp_trainer.async_step` do not: it is the server of
sync=async_parameter_server, unless sync.max_staleness is 0.

Source: Dive into Deep Learning, "Parameter Servers"; Li et al., Scaling Distributed Machine
Learning with the Parameter Server, 2014 (OSDI).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_trainer.sync.base import GradientSync, gradients_of


def assign_owners(sizes: dict[str, int], *, num_servers: int) -> dict[str, int]:
    """Return the owner of each key, a rank below `num_servers`.

    Each owner gets about the same number of elements. sizes: the number of elements of each key.
    """
    owner: dict[str, int] = {}
    load = [0] * num_servers
    for key, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owner[key] = load.index(min(load))
        load[owner[key]] += size
    return owner


class ParameterServerSync(GradientSync):
    """Sends each gradient to the owner of its parameter; the owner sends the new parameter back."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.parameters = dict(model.named_parameters())
        sizes = {key: parameter.numel() for key, parameter in self.parameters.items()}
        self.owner = assign_owners(sizes, num_servers=self.config.num_servers)
        for parameter in self.parameters.values():
            self.world.broadcast(parameter.detach())
        return model

    def owned(self, key: str) -> bool:
        """Return whether this rank owns `key`."""
        return self.owner[key] == self.world.rank

    def peers(self, key: str) -> list[int]:
        """Return the ranks with which this rank exchanges `key`: all others, or only its owner."""
        others = [rank for rank in range(self.world.world_size) if rank != self.world.rank]
        return others if self.owned(key) else [self.owner[key]]

    def push(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send each of `values` to the rank that owns its key. Collective.

        Returns the sum over ranks for each key that this rank owns.
        """
        parts = {
            key: {rank: value.new_empty(value.shape) for rank in self.peers(key)}
            for key, value in values.items()
            if self.owned(key)
        }
        self.exchange(values, into=parts)
        sums = {key: torch.zeros_like(values[key]) for key in parts}
        for key, received in parts.items():
            # in the order of ranks, so that rounding does not depend on the owner
            for rank in range(self.world.world_size):
                sums[key] += received.get(rank, values[key])
        return sums

    def pull(self, values: dict[str, Tensor]) -> None:
        """Replace each tensor in `values`, in place, by the value on the rank that owns its key.

        Collective: every rank must call this.
        """
        received = {
            key: {self.owner[key]: value.new_empty(value.shape)}
            for key, value in values.items()
            if not self.owned(key)
        }
        self.exchange(values, into=received)
        for key, by_rank in received.items():
            values[key].copy_(by_rank[self.owner[key]])

    def exchange(self, values: dict[str, Tensor], *, into: dict[str, dict[int, Tensor]]) -> None:
        """Receive tensors into those of `into`, by key and rank; send the other keys of `values`.

        Collective: every rank must call this.
        """
        self.world.exchange(
            send=[
                (value.contiguous(), rank)
                for key, value in values.items()
                if key not in into
                for rank in self.peers(key)
            ],
            receive=[
                (tensor, rank) for by_rank in into.values() for rank, tensor in by_rank.items()
            ],
        )

    def before_step(self) -> None:
        sums = self.push({key: p.grad for key, p in self.parameters.items() if p.grad is not None})
        for key, parameter in self.parameters.items():
            # None for the parameters of other owners, so that this rank's optimizer skips them
            parameter.grad = sums[key].div_(self.world.world_size) if key in sums else None

    def gradient_norm(self, model: nn.Module) -> Tensor:
        nothing = torch.zeros(1, device=self.world.device)  # a rank may own no key
        norm = nn.utils.get_total_norm([nothing, *gradients_of(model)])
        return self.world.all_reduce(norm.square()).sqrt()

    def after_step(self, optimizer: Optimizer) -> None:
        self.pull({key: p.detach() for key, p in self.parameters.items() if p.requires_grad})

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of all parameters: a resumed run may have other owners. Collective."""
        whole = optimizer.state_dict()
        keys = {parameter: key for key, parameter in self.parameters.items()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owned = [index for index, p in enumerate(parameters) if self.owned(keys[p])]
        described = [
            (index, name, str(value.dtype).removeprefix("torch."), list(value.shape))
            for index in owned
            for name, value in whole["state"].get(index, {}).items()
        ]
        state: dict[int, dict[str, Tensor]] = {}
        for rank, tensors in enumerate(self.world.all_gather_object(described)):
            for index, name, dtype, shape in tensors:
                value = torch.empty(shape, dtype=getattr(torch, dtype))
                if rank == self.world.rank:
                    value = whole["state"][index][name]
                value = value.to(self.world.device).contiguous()
                state.setdefault(index, {})[name] = self.world.broadcast(value, source=rank)
        return whole | {"state": state}
