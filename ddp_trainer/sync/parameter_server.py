"""A sharded parameter server: gradients go to owner ranks, which update the parameters and send
them back.

It teaches the cost of a server: with one server, m trained parameters and W ranks, 2·(W − 1)·m
elements pass through one network card, first all in, then all out. With a server on each rank, this
is a reduce-scatter and an all-gather.

Source: Dive into Deep Learning, "Parameter Servers"; Li et al., Scaling Distributed Machine
Learning with the Parameter Server, 2014 (OSDI).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_trainer.sync.base import GradientSync, gradients_of
from ddp_trainer.sync.key_value_store import KeyValueStore


class ParameterServerSync(GradientSync):
    """Sends gradients to the owner of each trained parameter, whose optimizer updates it, and
    copies it back.
    """

    def wrap(self, model: nn.Module) -> nn.Module:
        self.parameters = dict(model.named_parameters())
        self.store = KeyValueStore(self.world, num_servers=self.config.num_servers)
        self.store.init(self.parameters)  # type: ignore[arg-type]  # parameters are tensors
        return model

    def before_step(self) -> None:
        sums = self.store.push(
            {key: p.grad for key, p in self.parameters.items() if p.grad is not None}
        )
        for key, parameter in self.parameters.items():
            # an optimizer skips a parameter without a gradient
            parameter.grad = sums[key].div_(self.world.world_size) if key in sums else None

    def gradient_norm(self, model: nn.Module) -> Tensor:
        nothing = torch.zeros(1, device=self.world.device)  # a rank may own no key
        norm = nn.utils.get_total_norm([nothing, *gradients_of(model)])
        return self.world.all_reduce(norm.square()).sqrt()

    def after_step(self, optimizer: Optimizer) -> None:
        self.store.pull({key: p.detach() for key, p in self.parameters.items() if p.requires_grad})

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of all parameters, because a resumed run may have other owners."""
        whole = optimizer.state_dict()
        keys = {parameter: key for key, parameter in self.parameters.items()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owned = [index for index, p in enumerate(parameters) if self.store.owned(keys[p])]
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
