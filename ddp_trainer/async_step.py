"""Asynchronous training: ranks send gradients to a server, and do not wait for each other.

Rank 0 is the server, and also trains. A rank that has computed the gradient of a share of a global
batch sends it, and gets the newest parameters and another share. For W ranks, the server updates
the parameters with the mean of W gradients, whichever they are. A gradient's staleness is the
number of updates since its parameters were sent; a rank waits only where `max_staleness` could be
exceeded. At a control point all shares up to it are done, and all ranks have the same parameters.

A slow rank slows nobody: it gets fewer shares. The price is gradients of old parameters, a server
whose link carries all of them, and a result that depends on the time of their arrival.

Source: Dean et al., Large Scale Distributed Deep Networks, 2012 (gradients without waiting); Ho et
al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013 (the
bound); Zhang et al., Staleness-aware Async-SGD for Distributed Deep Learning, 2016 (an update after
W gradients, and their scale).
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from threading import Condition, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.config.sync import AsyncParameterServerConfig
from ddp_trainer.data.loaders import Batch, TrainLoader
from ddp_trainer.distributed.world import waiting
from ddp_trainer.sync.base import flatten, unflatten
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.run import Observer, TrainingRun
from ddp_trainer.training.step import TrainStep

Share = tuple[int, int]
"""A share of a global batch: the number of the batch, and the rank to which others assign it."""
NO_SHARE: Share = (-1, -1)


class Gradient(NamedTuple):
    """The gradient of a share."""

    share: Share
    is_used: Tensor
    """bool [P]: which of P parameters have a gradient."""
    values: Tensor
    """float32 [n]: the elements of all gradients, 0 for those that are not used."""


class Reply(NamedTuple):
    """The answer to a gradient."""

    version: int
    """The number of updates of the parameters, over all launches."""
    share: Share
    """The share that this rank gets in addition to those it has; `NO_SHARE` if there is none."""
    parameters: Tensor
    """float32 [n]"""


class Server:
    """Assigns the shares of some global batches, and updates parameters; threads of rank 0 call it.

    Each rank has its first shares already, see `first_shares`.
    """

    def __init__(
        self,
        steps: range,
        *,
        num_ranks: int,
        ahead: int,
        max_staleness: int,
        update: Callable[[int, list[Gradient], list[int]], None],
        parameters: Callable[[], Tensor],
    ) -> None:
        """update: updates the parameters; it gets a version, W gradients, and their staleness."""
        self.num_ranks = num_ranks
        self.max_staleness = max_staleness
        self.update = update
        self.parameters = parameters
        self.end = steps.stop
        self.free = sorted(product(steps[ahead + 1 :], range(num_ranks)))
        self.changed = Condition()
        self.version = steps.start
        self.num_begun = (steps.start + 1) * num_ranks
        """The number of shares whose gradients ranks have begun to compute, over all launches."""
        self.versions = dict.fromkeys(range(num_ranks), steps.start)
        """The version of the parameters with which a rank now computes a gradient, by rank."""
        self.num_held = [len(first_shares(steps, 0, ahead=ahead))] * num_ranks
        """The number of shares that each rank has, and whose gradients have not arrived."""
        self.arrived: dict[Share, tuple[Gradient, int]] = {}
        """Gradients for the next update, and their staleness."""
        self.error: Exception | None = None

    def answer(self, rank: int, gradient: Gradient) -> Reply:
        """Take a gradient; return a reply as soon as this rank may go on.

        Raises the exception with which another rank has failed.
        """
        with self.changed:
            staleness = self.version - self.versions.pop(rank)
            self.arrived[gradient.share] = (gradient, staleness)
            self.num_held[rank] -= 1
            if len(self.arrived) == self.num_ranks:
                # in the order of shares, so that rounding does not depend on arrival
                gradients, stale = zip(
                    *(self.arrived[s] for s in sorted(self.arrived)), strict=True
                )
                self.update(self.version, list(gradients), list(stale))
                self.arrived.clear()
                self.version += 1
            self.changed.notify_all()

            share = self.take(rank)
            may_go_on = self.may_begin if self.num_held[rank] else self.is_complete
            self.changed.wait_for(lambda: self.error or may_go_on())
            if self.error is not None:
                raise self.error
            if self.num_held[rank]:
                self.versions[rank] = self.version
                self.num_begun += 1
            return Reply(self.version, share, self.parameters())

    def take(self, rank: int) -> Share:
        """Assign to `rank` a share of the first global batch that has one: its own, if it can."""
        if not self.free:
            return NO_SHARE
        step, first = self.free[0]
        share = (step, rank if (step, rank) in self.free[: self.num_ranks] else first)
        self.free.remove(share)
        self.num_held[rank] += 1
        return share

    def may_begin(self) -> bool:
        """Return whether a rank may begin to compute a gradient with the newest parameters.

        If all gradients begun arrive before the oldest of them, its staleness is the largest.
        """
        oldest = min([self.version, *self.versions.values()])
        return self.num_begun // self.num_ranks - oldest <= self.max_staleness

    def is_complete(self) -> bool:
        """Return whether the gradients of all shares have arrived."""
        return self.version == self.end

    def fail(self, error: Exception) -> None:
        """Let all threads that wait for a reply raise `error`."""
        with self.changed:
            self.error = error
            self.changed.notify_all()


def first_shares(steps: range, rank: int, *, ahead: int) -> list[Share]:
    """Return the shares that a rank gets before its first gradient: one, and those read ahead."""
    return [(step, rank) for step in steps[: ahead + 1]]


class AsyncStep(TrainStep):
    """A training step of which each rank takes as many as it can between two control points."""

    def __init__(self, *arguments: Any, config: AsyncParameterServerConfig, **options: Any) -> None:
        super().__init__(*arguments, **options)
        world = self.world
        self.config = config
        self.staleness: Counter[int] = Counter()
        """On rank 0: how many gradients have had each staleness, since the last log point."""
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if world.is_main:
            # The parameters of `model` are those of the server. Statistics are shared.
            shared = {id(buffer): buffer for buffer in self.model.buffers()}
            self.replica = copy.deepcopy(self.model, shared)
        else:
            self.nonfinite.finite_steps += 2**62  # only the server checks gradients
        self.replicas = [p for p in self.replica.parameters() if p.requires_grad]
        self.counters = [b for b in self.model.buffers() if not b.is_floating_point()]
        """Buffers such as the number of batches that BatchNorm has seen."""
        self.share: Share = NO_SHARE
        """The share of the last step."""
        self.to_read: deque[Share] = deque()
        self.to_train: deque[Share] = deque()
        self.steps = range(0)
        """The global batches of which the shares are assigned now."""
        self.server: Server | None = None
        self.threads: list[Thread] = []
        # of its own, because threads use it while the main thread may use the other
        self.link = (
            world if world.world_size == 1 else replace(world, group=dist.new_group(backend="gloo"))
        )

    @property
    def batch_number(self) -> int:
        return self.share[0]

    def batches(
        self, loader: TrainLoader, *, last_step: int, next_control: Callable[[int], int]
    ) -> Iterator[Batch]:
        world_size = self.world.world_size
        size = self.settings.global_batch_size
        shares = [range(rank, size, world_size) for rank in range(world_size)]
        ids, params = loader.draw_epoch(shares)
        first_step = self.count
        ahead = loader.reader.ahead

        def rows() -> Iterator[int]:
            while self.to_read:
                share = self.to_read.popleft()
                self.to_train.append(share)
                yield (share[0] - first_step) * world_size + share[1]

        while self.count < last_step:
            end = min(last_step, next_control(self.count))
            self.open(range(self.count, end), ahead=ahead)
            yield from loader.read(ids, params, rows(), num_shares=world_size)

    def begin_training(self) -> None:
        super().begin_training()
        for module, replica in zip(self.model.modules(), self.replica.modules(), strict=True):
            module.training = replica.training

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        if not self.to_train:  # a benchmark takes steps without `batches`
            self.open(range(self.count, self.count + 1), ahead=0)
            self.to_train.append(self.to_read.popleft())
        self.share = self.to_train.popleft()
        number, rank = self.share
        self.seed(f"rank {rank}", step=number)
        self.replica.zero_grad(set_to_none=True)
        self.on_phase(Phase.forward)
        loss = self.accumulate(images, labels)

        self.on_phase(Phase.gradient_sync)
        is_used = torch.tensor([p.grad is not None for p in self.replicas])
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.replicas]
        reply = self.send(Gradient(self.share, is_used, flatten(gradients).cpu()))
        unflatten(reply.parameters.to(self.world.device), self.replicas)
        if reply.share != NO_SHARE:
            self.to_read.append(reply.share)
        has_more = self.to_read or self.to_train
        # in between never the number of a control point
        between = min(max(reply.version, self.steps[0] + 1), self.steps[-1])
        self.count = between if has_more else self.steps.stop
        if not has_more:
            self.close()
        self.on_phase(Phase.between_steps)
        return loss

    def open(self, steps: range, *, ahead: int) -> None:
        """Begin the global batches `steps`. Collective: all ranks have the same parameters.

        ahead: how many shares a rank has in addition to the one that it computes.
        """
        self.steps = steps
        self.to_read.extend(first_shares(steps, self.world.rank, ahead=ahead))
        if not self.world.is_main:
            return
        unflatten(flatten(self.parameters), self.replicas)
        self.server = Server(
            steps,
            num_ranks=self.world.world_size,
            ahead=ahead,
            max_staleness=self.config.max_staleness,
            update=self.update_parameters,
            parameters=lambda: flatten(self.parameters).cpu(),
        )
        self.threads = [
            Thread(target=self.serve, args=(self.server, rank), daemon=True)
            for rank in range(1, self.world.world_size)
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """End the global batches `steps`, after which all ranks have the same. Collective."""
        for thread in self.threads:
            thread.join()
        for buffer in self.counters:
            self.link.broadcast(buffer)

    def send(self, gradient: Gradient) -> Reply:
        """Send a gradient to the server and return its reply."""
        if self.server is not None:
            with waiting():
                return self.server.answer(0, gradient)
        version = torch.empty(3, dtype=torch.int64)
        parameters = torch.empty_like(gradient.values)
        head = torch.tensor([*gradient.share, *gradient.is_used])
        self.link.exchange(
            send=[(head, 0), (gradient.values, 0)], receive=[(version, 0), (parameters, 0)]
        )
        number, step, rank = version.tolist()
        return Reply(number, (step, rank), parameters)

    def serve(self, server: Server, rank: int) -> None:
        """Answer the gradients of `rank` up to the end of the server's global batches."""
        torch.set_num_threads(1)  # of this thread, because the others train
        group = self.link.group
        size = sum(parameter.numel() for parameter in self.parameters)
        try:
            while server.num_held[rank]:
                head = torch.empty(2 + len(self.parameters), dtype=torch.int64)
                values = torch.empty(size)
                dist.recv(head, rank, group)
                dist.recv(values, rank, group)
                step, owner = head[:2].tolist()
                reply = server.answer(rank, Gradient((step, owner), head[2:].bool(), values))
                dist.send(torch.tensor([reply.version, *reply.share]), rank, group)
                dist.send(reply.parameters, rank, group)
        except Exception as error:  # to be raised in the main thread
            server.fail(error)

    def update_parameters(
        self, version: int, gradients: list[Gradient], staleness: list[int]
    ) -> None:
        """Take the optimizer step `version` with the mean of gradients."""
        self.staleness.update(staleness)
        total = torch.zeros_like(gradients[0].values)
        for gradient, age in zip(gradients, staleness, strict=True):
            total += (
                gradient.values / (1 + age) if self.config.scale_by_staleness else gradient.values
            )
        total = total.div_(self.world.world_size).to(self.world.device)
        is_used = torch.stack([gradient.is_used for gradient in gradients]).any(0)
        parts = total.split([parameter.numel() for parameter in self.parameters])
        for parameter, part, used in zip(self.parameters, parts, is_used, strict=True):
            if used:
                parameter.grad = torch.empty_like(parameter).copy_(part.view_as(parameter))
        self.set_lr(version)
        self.update(torch.zeros((), device=self.world.device), None)


class Staleness(Observer):
    """Logs the mean and the maximum staleness, and the share of gradients that had each one."""

    def on_log(self, run: TrainingRun) -> None:
        step = run.train_step
        if not isinstance(step, AsyncStep) or not step.staleness:
            return
        total = step.staleness.total()
        run.log(
            {
                "staleness/mean": sum(k * count for k, count in step.staleness.items()) / total,
                "staleness/max": max(step.staleness),
                **{
                    f"staleness/share_{k}": step.staleness[k] / total
                    for k in range(step.config.max_staleness + 1)
                },
            }
        )
        step.staleness.clear()
