"""The check for silent data corruption: another rank recomputes each gradient, to compare them."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from statistics import multimode

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ddp_trainer.config.errors import require
from ddp_trainer.distributed.world import World
from ddp_trainer.sync.buffers import preserved_buffers
from ddp_trainer.sync.fingerprint import DesynchronizedError, bit_sum, rank_outside_majority
from ddp_trainer.training.step import TrainStep

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""By the dtype of the computation: the largest difference between the sums of two ranks (`sums_of`)
that counts as rounding, divided by the 2-norm of the gradient.
"""


class CorruptionError(DesynchronizedError):
    """Two ranks computed different gradients from the same images, or have different parameters.

    rank: the faulty rank; None if it is not known.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class GradientCheck:
    """Compares each rank's gradient with the gradient of the next rank from the same images.

    Every ``every_steps`` steps, before the optimizer uses the gradients, each rank r sends its
    share of the batch to rank r + 1, which computes the gradient again. If the two gradients
    differ, rank r + 2 computes the gradient too, which shows which rank is wrong (all ranks modulo
    the world size). The check compares sums over the gradients, not single elements.
    Collective: every rank must construct a GradientCheck.
    """

    def __init__(self, step: TrainStep, *, every_steps: int, deterministic: bool) -> None:
        """Prepare to check `step`; ConfigError if the backend cannot send batches between ranks.

        deterministic: whether a GPU that repeats a computation gives the same bits, as a CPU does.
        If so, gradients of ranks with equal hardware must be bitwise equal.
        """
        world = step.world
        require(
            world.device.type == "cpu" or world.backend != "gloo" or world.world_size == 1,
            f"check.every_steps={every_steps} sends batches between ranks, which backend=gloo"
            " cannot do for GPUs: use backend=nccl, or check.every_steps=null",
        )
        self.step = step
        self.world = world
        self.every_steps = every_steps
        self.is_pending = False
        """Whether a check is due, maybe since an earlier step, when parameters differed by rank."""
        self.parameters = [
            parameter for parameter in step.model.parameters() if parameter.requires_grad
        ]
        self.hosts: list[str] = world.all_gather_object(socket.gethostname())
        machines = world.all_gather_object(machine(world.device))
        is_repeatable = world.device.type == "cpu" or deterministic
        self.tolerance = None
        """One of `TOLERANCES`; None if gradients must be bitwise equal."""
        if not is_repeatable or len(set(machines)) > 1:
            is_tf32 = world.device.type == "cuda" and torch.backends.cudnn.allow_tf32
            # TF32 has as many mantissa bits as float16
            fp32 = torch.float16 if is_tf32 else torch.float32
            self.tolerance = TOLERANCES[step.settings.autocast_dtype or fp32]
        self._sums: dict[Tensor, Tensor] = {}
        """The result of `sums_of` for the gradient of each parameter, in a step that is checked."""
        self._hooks: list[RemovableHandle] = []

    def is_due(self) -> bool:
        """Return whether to check the next step. Must be called before each step.

        The check is postponed while the parameters differ between ranks, as in sync=local_sgd.
        """
        self.is_pending |= (self.step.count + 1) % self.every_steps == 0
        return self.is_pending and self.step.sync.is_synchronized

    def before_forward(self, images: Tensor, labels: Tensor) -> None:
        """If this step is checked, let hooks record the sums of each gradient during backward.

        Hooks are necessary because DDP averages gradients over ranks before backward ends.
        """
        if not self.is_due():
            return

        def record(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._sums[parameter] = self.sums_of(parameter.grad)

        self._sums.clear()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(record) for parameter in self.parameters
        ]

    def before_optimizer(self, images: Tensor, labels: Tensor) -> None:
        """If this step is checked, compare gradients of rank pairs, and the parameters of all.

        images, labels: this rank's share of the batch, as in `before_forward`. Collective.

        Raises:
            CorruptionError: on all ranks, if gradients or parameters differ.
        """
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.is_pending = False

        own = self.gather(torch.stack(list(self._sums.values())).sum(0))
        second = self.recompute(images, labels, shift=1)
        models = self.gather(exact_bit_sum(self.parameters)).flatten().tolist()
        if models.count(models[0]) < len(models):
            self.fail(rank_outside_majority(models), "holds other parameters than the rest")
        differing = [
            rank for rank in range(len(own)) if not self.are_equal(own[rank], second[rank])
        ]
        if differing:
            third = self.recompute(images, labels, shift=2)
            self.fail(
                self.wrong_rank(own, second, third, differing),
                "computed another gradient than other ranks from the same images",
            )

    def wrong_rank(
        self, own: Tensor, second: Tensor, third: Tensor, differing: Sequence[int]
    ) -> int | None:
        """Return the rank that computed wrong gradients; None if the votes do not name one rank.

        own, second, third: float64 [W, n], W = world size. Row r has the sums of the gradient for
        the batch of rank r. Rank r computed the row in `own`, rank r + 1 (modulo W) the row in
        `second`, rank r + 2 the row in `third`. differing: the rows in which `own` and `second`
        differ.
        """
        votes = []
        for row in differing:
            if self.are_equal(second[row], third[row]):
                votes.append(row)
            # not with 2 ranks, because then one rank has computed both `own` and `third`
            elif len(own) > 2 and self.are_equal(own[row], third[row]):
                votes.append((row + 1) % len(own))
        most_votes = multimode(votes)
        return most_votes[0] if len(most_votes) == 1 else None

    def fail(self, rank: int | None, what: str) -> None:
        """Raise CorruptionError: its message says that `rank` (None: some rank) did `what`."""
        who = "one of the ranks" if rank is None else f"rank {rank} on {self.hosts[rank]}"
        raise CorruptionError(
            f"{who} {what}, in step {self.step.count + 1}: nothing of this step was used or saved;"
            " the memory or processor of a node is faulty, or code is not deterministic: resume on"
            " other nodes, or make the code deterministic",
            rank,
        )

    def recompute(self, images: Tensor, labels: Tensor, *, shift: int) -> Tensor:
        """Compute each rank's gradient on another rank; return the sums, float64 [ranks, n].

        Row r has the sums of the gradient for the batch of rank r, which rank r + `shift` (modulo
        the number of ranks) computes. n is 1 or 3 (see `sums_of`). Collective.
        images: this rank's [B, C, H, W], labels: [B] or [B, classes]; B differs by rank.
        """
        step = self.step
        ranks = self.world.world_size
        source = (self.world.rank - shift) % ranks
        if source != self.world.rank:
            length = len(range(source, step.settings.global_batch_size, ranks))
            target = (self.world.rank + shift) % ranks
            images = pass_on(images, length, self.world, source=source, target=target)
            labels = pass_on(labels, length, self.world, source=source, target=target)
        step.seed(f"rank {source}")
        gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        with preserved_buffers(step.model):
            for part in step.split(images, labels):
                loss, *_ = step.compute_loss(step.model, *part)
                torch._foreach_add_(
                    gradients, torch.autograd.grad(loss, self.parameters, materialize_grads=True)
                )
        sums = torch.stack([self.sums_of(gradient) for gradient in gradients]).sum(0)
        return self.gather(sums).roll(-shift, 0)

    def gather(self, vector: Tensor) -> Tensor:
        """Return every rank's `vector`, [n], as one tensor on the CPU, [W, n]. Collective."""
        return torch.stack(self.world.all_gather(vector)).cpu()

    def sums_of(self, gradient: Tensor) -> Tensor:
        """Return sums over `gradient` to compare: float64 [1] for bitwise comparison, else [3].

        The caller adds the sums of all parameters. For bitwise comparison, this addition is exact
        (see `exact_bit_sum`).
        """
        if self.tolerance is None:
            return exact_bit_sum([gradient])
        flat = gradient.detach().double().contiguous().view(-1)
        signs = 1 - 2 * ((torch.arange(len(flat), device=flat.device) * 2654435761 >> 16) % 2)
        # The sums of the squares, of the elements, and of the elements with pseudo-random signs.
        return torch.stack([flat.square().sum(), flat.sum(), (flat * signs).sum()])

    def are_equal(self, first: Tensor, second: Tensor) -> bool:
        """Return whether two results of `sums_of` are equal, bitwise or within `tolerance`.

        Two results that are not finite are equal.
        """
        if self.tolerance is None:
            return torch.equal(first, second)
        are_finite = [bool(vector.isfinite().all()) for vector in (first, second)]
        if not all(are_finite):  # gradients of fp16 may overflow, on both ranks alike
            return not any(are_finite)
        norm = max(float(first[0]), float(second[0])) ** 0.5
        return bool(((first - second)[1:].abs() <= self.tolerance * norm).all())


def exact_bit_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the low 40 bits of `bit_sum`, float64 [1]: the sum of 2^13 such numbers is exact."""
    return (bit_sum(tensors) % 2**40).double()[None]


def pass_on(tensor: Tensor, length: int, world: World, *, source: int, target: int) -> Tensor:
    """Send `tensor`, [B, …], to rank `target`; return the tensor of rank `source`, [length, …].

    The result has the memory format of `tensor`. Collective.
    """
    # The memory of dense copies is sent, so that the received batch has the same strides.
    sent = torch.empty_like(tensor).copy_(tensor)
    received = torch.empty_strided(
        (length, *tensor.shape[1:]),
        (tensor[0].numel(), *sent.stride()[1:]),
        dtype=tensor.dtype,
        device=tensor.device,
    )
    out, into = (dense.as_strided((dense.numel(),), (1,)) for dense in (sent, received))
    world.exchange(send=[(out, target)], receive=[(into, source)])
    return received


def machine(device: torch.device) -> str:
    """Return the model of `device`; for a CPU, also its instruction set and number of threads.

    These decide how results are rounded: where they are equal, results are bitwise equal.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")  # on Linux
    models = re.findall("model name.*", info.read_text()) if info.exists() else []
    return (
        f"{models[:1]}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{torch.get_num_threads()} threads"
    )
