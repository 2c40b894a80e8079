"""Pipeline parallelism: the layers of a model are cut into stages, and a rank keeps one of them.

S ranks next to each other are a pipeline. W ranks are W/S pipelines, which average the gradients of
a stage as data parallelism does. In a pipeline, the first stage gets the images of all its ranks,
and the last one their labels. Microbatches go through the stages one after another: a stage works
on one while the next stage works on the one before. This strategy shows what that costs. With m
microbatches, a stage has nothing to do for (S − 1)/(m + S − 1) of the time, and all wait for the
slowest stage. For each image of its pipeline, a rank sends the output of its stage to the next one,
and gets as many gradients back; the number of parameters does not matter.

A microbatch has the images that a rank passes at once with sync=ddp, so that BatchNorm normalizes
the same ones: S·gradient_accumulation_steps microbatches are a step of a pipeline.

Source: Huang et al., GPipe, 2019 (arXiv 1811.06965); Narayanan et al., PipeDream, 2019 (arXiv
1806.03377), for the schedule 1F1B.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.distributed.world import World
from ddp_trainer.sync.base import flatten, unflatten
from ddp_trainer.sync.buffers import preserved_buffers
from ddp_trainer.sync.sharded import ShardedSync


class PipelineSync(ShardedSync):
    """Cuts a model into stages with about as much work; a rank keeps the parameters of its stage.

    `PipelineStep` sends the activations.
    """

    image_shape: tuple[int, ...]
    """(channels, height, width); to be set before `wrap`."""

    def __init__(self, config: Any, world: World) -> None:
        super().__init__(config, world)
        ranks = range(world.world_size)
        size = config.num_stages
        self.pipeline = split_world(world, [ranks[first:][:size] for first in ranks[::size]])
        """The ranks that have the stages of this rank's pipeline, by stage."""
        self.replicas = split_world(world, [ranks[stage::size] for stage in ranks[:size]])
        """The ranks that have the same stage as this one."""
        self.shard_world = self.pipeline

    def wrap(self, model: nn.Module) -> nn.Module:
        self.stages, self.owners, _ = cut(
            model, self.image_shape, num_stages=self.config.num_stages, device=self.world.device
        )
        return super().wrap(model)

    def shard(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Empty the parameters of other stages."""
        named = list(model.named_parameters(remove_duplicate=False))
        for name, parameter in named:
            require(
                parameter.ndim > 0,
                f"sync=pipeline cannot cut the model, because its parameter {name} has no"
                " dimension: use sync=ddp",
            )
            self.rows[name] = len(parameter)
        for name, parameter in named:
            if self.owners[name] != self.pipeline.rank:
                parameter.data = parameter.new_empty(0, *parameter.shape[1:])
        return dict(model.named_parameters())

    def sizes(self, name: str) -> list[int]:
        """Return the number of rows of each stage: all, or none."""
        owner = self.owners[name]
        return [self.rows[name] * (stage == owner) for stage in range(self.config.num_stages)]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return a copy of `whole` in its memory layout, or nothing of it."""
        own = whole if self.owners[name] == self.pipeline.rank else whole[:0]
        return own.to(self.world.device, copy=True)

    def gather_at(self, stage: int, tensor: Tensor) -> Tensor | None:
        """Return on rank `stage` the tensors of all ranks of the pipeline, one after another.

        Other ranks return None. Collective: all ranks have tensors of one shape.
        """
        world = self.pipeline
        if world.rank != stage:
            world.exchange(send=[(tensor.contiguous(), stage)], receive=[])
            return None
        whole = tensor.new_empty(world.world_size, *tensor.shape)
        whole[stage] = tensor
        others = [(part, rank) for rank, part in enumerate(whole) if rank != stage]
        world.exchange(send=[], receive=others)
        return whole.flatten(0, 1)

    def before_step(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in trained:
            if parameter.grad is None:  # so that all ranks have moments of the same parameters
                parameter.grad = torch.zeros_like(parameter)
        if trained and self.replicas.world_size > 1:
            gradients = self.gradients()
            total = self.replicas.all_reduce(flatten(gradients))
            unflatten(total / self.replicas.world_size, gradients)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the buffers of each stage to all ranks of the pipeline."""
        named = list(self.model.named_buffers())
        for stage in range(self.config.num_stages):
            buffers = [buffer for name, buffer in named if self.owners[name] == stage]
            if buffers:
                values = flatten([buffer.double() for buffer in buffers])
                unflatten(self.pipeline.broadcast(values, source=stage), buffers)


def split_world(world: World, parts: list[Sequence[int]]) -> World:
    """Return the world of this rank's part of the ranks. Collective."""
    ranks = next(part for part in parts if world.rank in part)
    group, _ = dist.new_subgroups_by_enumeration(list(map(list, parts)), backend=world.backend)
    return replace(world, rank=ranks.index(world.rank), world_size=len(ranks), group=group)


class Cut(NamedTuple):
    """A model that is cut into stages."""

    stages: list[fx.GraphModule]
    """Modules that run one after another, with the parameters of the model themselves."""
    owners: dict[str, int]
    """The stage of each parameter and buffer, by name."""
    flops: list[float]
    """The floating-point operations of the forward pass of each stage, for two images."""


class Segment(NamedTuple):
    """Operations between two places where a model can be cut."""

    nodes: list[fx.Node]
    tensors: set[int]
    """The ids of the parameters and buffers that they use."""
    flops: float


class Profile(fx.Interpreter):
    """Runs a model; keeps the results and the floating-point operations of its nodes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.flops: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self.flops[n] = counter.get_total_flops()
        return result


def cut(
    model: nn.Module, image_shape: tuple[int, ...], *, num_stages: int, device: torch.device
) -> Cut:
    """Cut `model` into stages with about as much work. image_shape: (channels, height, width).

    Raises:
        ConfigError: the model cannot be cut, or not into so many stages.
    """
    model.train()
    try:
        traced = fx.symbolic_trace(model)
        profile = Profile(traced)
        with torch.no_grad(), preserved_buffers(model):
            profile.run(torch.zeros(2, *image_shape, device=device))
    except Exception as error:  # of a plug-in's model, which may raise anything
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"sync=pipeline cannot cut the model, because torch.fx cannot trace it ({reason}):"
            " use sync=ddp"
        ) from error
    segments = segments_of(traced, profile)
    require(
        len(segments) >= num_stages,
        f"sync.num_stages={num_stages} must be at most {len(segments)}, because the model can be"
        f" cut at {len(segments) - 1} places only: lower it, or use sync=ddp",
    )
    stages: list[fx.GraphModule] = []
    flops: list[float] = []
    owners: dict[int, int] = {}
    first = 0
    for stage, end in enumerate(balanced([part.flops for part in segments], num_stages)):
        parts = segments[first:end]
        first = end
        flops.append(sum(part.flops for part in parts))
        stages.append(stage_of(model, [node for part in parts for node in part.nodes]))
        for part in parts:
            owners |= dict.fromkeys(part.tensors, stage)
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return Cut(stages, {name: owners.get(id(tensor), 0) for name, tensor in named}, flops)


def segments_of(traced: fx.GraphModule, profile: Profile) -> list[Segment]:
    """Return the parts of a model between all places where it can be cut, in order.

    It can be cut where one tensor is all that is computed before and used after it, and where no
    parameter or buffer is used on both sides. Each part uses a parameter.
    """
    nodes = [node for node in traced.graph.nodes if node.op not in ("get_attr", "output")]
    places = {node: place for place, node in enumerate(nodes)}
    last_use = {
        node: max((places.get(user, len(nodes)) for user in node.users), default=-1)
        for node in nodes
    }
    tensors = [tensors_of(traced, node) for node in nodes]
    last_tensor = {tensor: place for place, used in enumerate(tensors) for tensor in used}

    segments = [Segment([], set(), 0.0)]
    for place, node in enumerate(nodes):
        nodes_before, used, flops = segments.pop()
        used = used | tensors[place]
        segments.append(Segment([*nodes_before, node], used, flops + profile.flops[node]))
        live = [other for other in nodes[: place + 1] if last_use[other] > place]
        is_pinned = any(last_tensor[tensor] > place for tensor in used)
        if live == [node] and torch.is_tensor(profile.env[node]) and used and not is_pinned:
            segments.append(Segment([], set(), 0.0))
    *others, last = segments
    if others and not last.tensors:  # the rest of the last part
        before = others.pop()
        last = Segment([*before.nodes, *last.nodes], before.tensors, before.flops + last.flops)
    return [*others, last]


def tensors_of(traced: fx.GraphModule, node: fx.Node) -> set[int]:
    """Return the ids of the parameters and buffers that a node uses."""
    found: set[int] = set()
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        found |= {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            found.add(id(attrgetter(str(source.target))(traced)))
    return found


def balanced(costs: Sequence[float], num_parts: int) -> list[int]:
    """Return the ends of consecutive parts of `costs`, so that the largest sum is as low as can be.

    There are at least `num_parts` costs; no part is empty.
    """
    sums = [0.0, *accumulate(costs)]
    best = {end: (sums[end], [end]) for end in range(1, len(sums))}
    for _ in range(num_parts - 1):
        best = {
            end: min(
                (max(largest, sums[end] - sums[start]), [*ends, end])
                for start, (largest, ends) in best.items()
                if start < end
            )
            for end in best
            if end > min(best)
        }
    return best[len(costs)][1]


def stage_of(model: nn.Module, nodes: list[fx.Node]) -> fx.GraphModule:
    """Return a module that runs `nodes`, with the parameters and modules of `model` themselves."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter, or the result of the stage before
            is_attribute = node.op == "get_attr"
            copies[node] = graph.node_copy(node) if is_attribute else graph.placeholder("input")
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(copies[nodes[-1]])
    return fx.GraphModule(model, graph)
