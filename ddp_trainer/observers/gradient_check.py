"""The check for silent corruption: gradients are computed again on another rank, and compared."""

import platform
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ddp_trainer.config.errors import require
from ddp_trainer.sync.base import start_exchange, wait_for
from ddp_trainer.sync.buffers import preserved_buffers
from ddp_trainer.sync.fingerprint import DesynchronizedError, bit_sum, rank_outside_majority
from ddp_trainer.training.step import TrainStep

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""By dtype: the largest difference of two sums over a gradient, divided by its norm."""
Shifted = tuple[list[dist.Work], Tensor, Tensor]
"""Requests to wait for, then images and labels, which are valid after them."""
TAG = 1
"""The tag of this check's messages, which keeps them apart from those of the strategy."""


class CorruptionError(DesynchronizedError):
    """A rank computed another gradient from the same images, or has other parameters."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class GradientCheck:
    """Compares each rank's gradient with that which the next rank computes from the same images.

    Every ``every_steps`` steps, before the optimizer uses the gradients, each rank r sends its
    share of the batch to rank r + 1, which computes the gradient again. If the two gradients
    differ, rank r + 2 computes a third one, which shows which rank is wrong. Collective: every rank
    must construct one.
    """

    def __init__(self, step: TrainStep, *, every_steps: int, deterministic: bool) -> None:
        """Prepare to check `step`; ConfigError if the backend cannot send batches between ranks.

        deterministic: whether GPUs repeat results exactly, as CPUs do. If so, equal hardware must
        give equal bits.
        """
        require(
            step.world.device.type == "cpu"
            or step.world.backend != "gloo"
            or step.world.world_size == 1,
            f"check.every_steps={every_steps} sends batches between ranks, which backend=gloo"
            " cannot do for GPUs: use backend=nccl, or check.every_steps=null",
        )
        self.step = step
        self.world = step.world
        self.every_steps = every_steps
        self.parameters = [
            parameter for parameter in step.model.parameters() if parameter.requires_grad
        ]
        self.hosts: list[str] = self.world.all_gather_object(socket.gethostname())
        machines = self.world.all_gather_object(machine(self.world.device))
        is_repeatable = self.world.device.type == "cpu" or deterministic
        self.tolerance = None
        """One of `TOLERANCES`; None if gradients must be bitwise equal."""
        if not is_repeatable or len(set(machines)) > 1:
            is_tf32 = self.world.device.type == "cuda" and torch.backends.cudnn.allow_tf32
            fp32 = torch.float16 if is_tf32 else torch.float32  # TF32 has as many digits as float16
            self.tolerance = TOLERANCES[step.settings.autocast_dtype or fp32]
        self.checked: int | None = None
        """The last step that was checked, or that after which this launch began."""
        self._prints: dict[Tensor, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._batch: Shifted | None = None

    def is_due(self) -> bool:
        """Return whether to check the next step: every `every_steps` steps.

        The check is postponed while the parameters differ between ranks.
        """
        before = self.step.count if self.checked is None else self.checked
        self.checked = before
        is_later = (self.step.count + 1) // self.every_steps > before // self.every_steps
        return is_later and self.step.sync.is_synchronized

    def before_forward(self, images: Tensor, labels: Tensor) -> None:
        """If this step is to be checked, record each gradient as soon as backward has computed it.

        It is recorded before it is averaged. Also begins to send the batch to the next rank: the
        transfer goes on while this rank computes the step.
        """
        if not self.is_due():
            return

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._prints[parameter] = self.describe(parameter.grad)

        self._prints.clear()
        self._batch = self.start_shift(images, labels, shift=1)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(take) for parameter in self.parameters
        ]

    def before_optimizer(self, images: Tensor, labels: Tensor) -> None:
        """Compare each rank's gradient with the next rank's, and the parameters of all ranks.

        images, labels: this rank's batch, as given to `before_forward`. Collective.

        Raises:
            CorruptionError: on all ranks, if gradients or parameters differ.
        """
        if self._batch is None:
            return
        for hook in self._hooks:
            hook.remove()
        self.checked = self.step.count + 1
        own = self.combine([self._prints.get(parameter) for parameter in self.parameters])
        again = self.recompute(self._batch, shift=1)
        self._batch = None
        model = exact_bit_sum(self.parameters)
        table = torch.stack(self.world.all_gather(torch.cat([own, again, model]))).cpu()
        owns, agains, models = table.split([len(own), len(again), 1], dim=1)
        agains = agains.roll(-1, 0)
        sums = models[:, 0].tolist()
        if len(set(sums)) > 1:
            self.fail(rank_outside_majority(sums), "holds other parameters than the rest")
        pairs = zip(owns, agains, strict=True)
        differing = [rank for rank, pair in enumerate(pairs) if not self.are_equal(*pair)]
        if differing:
            again = self.recompute(self.start_shift(images, labels, shift=2), shift=2)
            third = torch.stack(self.world.all_gather(again)).cpu().roll(-2, 0)
            self.decide(owns, agains, third, differing)

    def decide(self, own: Tensor, second: Tensor, third: Tensor, differing: Sequence[int]) -> None:
        """Raise CorruptionError, which names the rank with wrong gradients, if that is clear.

        own, second, third: float64 [W, n], W = world size. Row r has results of `combine` for the
        batch of rank r: in `own` the result of rank r, in `second` that of rank r + 1, in `third`
        that of rank r + 2 (modulo W). differing: the numbers of the rows in which `own` and
        `second` differ.
        """
        votes: Counter[int | None] = Counter()
        ranks = self.world.world_size
        for rank in differing:
            if self.are_equal(second[rank], third[rank]):
                votes[rank] += 1
            elif ranks > 2:
                votes[(rank + 1) % ranks] += 1
                votes[rank] += not self.are_equal(own[rank], third[rank])
        (rank, count), (_, next_count), *_ = [*votes.most_common(2), (None, 0), (None, 0)]
        self.fail(
            rank if count > next_count else None,
            "computed another gradient than other ranks from the same images",
        )

    def fail(self, rank: int | None, what: str) -> None:
        """Raise CorruptionError: `rank` (None: an unknown rank) did `what`."""
        who = f"one of the ranks (on {', '.join(dict.fromkeys(self.hosts))})"
        if rank is not None:
            who = f"rank {rank} on {self.hosts[rank]}"
        raise CorruptionError(
            f"{who} {what}, in step {self.step.count + 1}: nothing of this step was used or saved;"
            " the cause is faulty memory, a faulty processor, or code that is not deterministic",
            rank,
        )

    def start_shift(self, images: Tensor, labels: Tensor, *, shift: int) -> Shifted:
        """Begin to send the batch to rank r + `shift`, and to receive that of rank r - `shift`.

        r is this rank. images: [B, C, H, W], labels: [B] or [B, classes]; B differs by rank.
        """
        rank = self.world.rank
        ranks = self.world.world_size
        source = (rank - shift) % ranks
        target = (rank + shift) % ranks
        if source == rank:
            return [], images, labels
        length = len(range(source, self.step.settings.global_batch_size, ranks))
        image_operations, received_images = transfer(images, length, source=source, target=target)
        label_operations, received_labels = transfer(labels, length, source=source, target=target)
        requests = start_exchange([*image_operations, *label_operations])
        return requests, received_images, received_labels

    def recompute(self, batch: Shifted, *, shift: int) -> Tensor:
        """Return `combine` of the gradient of the batch of rank r - `shift`; r is this rank."""
        requests, images, labels = batch
        wait_for(requests)
        step = self.step
        source = (self.world.rank - shift) % self.world.world_size
        step.seed(rank=source)
        gradients: list[Tensor | None] = [None] * len(self.parameters)
        with preserved_buffers(step.model):
            for part in step.split(images, labels):
                loss, *_ = step.loss(step.model, *part)
                found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
                gradients = [add(*pair) for pair in zip(gradients, found, strict=True)]
        return self.combine([None if one is None else self.describe(one) for one in gradients])

    def describe(self, gradient: Tensor) -> Tensor:
        """Return sums that stand for `gradient`: float64 [1] for bitwise comparison, else [3]."""
        if self.tolerance is None:
            return exact_bit_sum([gradient])
        flat = gradient.detach().double().contiguous().view(-1)
        signs = 1 - 2 * ((torch.arange(len(flat), device=flat.device) * 2654435761 >> 16) % 2)
        # The sums of the squares, of the elements, and of the elements with pseudo-random signs.
        return torch.stack([flat.square().sum(), flat.sum(), (flat * signs).sum()])

    def combine(self, prints: Sequence[Tensor | None]) -> Tensor:
        """Return one vector from results of `describe` for all parameters; None: no gradient."""
        size = 1 if self.tolerance is None else 3
        empty = torch.zeros(size, dtype=torch.float64, device=self.world.device)
        vectors = [empty if one is None else one for one in prints]
        return torch.cat(vectors) if self.tolerance is None else torch.stack(vectors).sum(0)

    def are_equal(self, first: Tensor, second: Tensor) -> bool:
        """Return whether two vectors from `combine` are equal, up to rounding with a tolerance."""
        if self.tolerance is None:
            return torch.equal(first, second)
        are_finite = [bool(vector.isfinite().all()) for vector in (first, second)]
        if not all(are_finite):  # gradients of fp16 sometimes overflow
            return not any(are_finite)
        norm = max(float(first[0]), float(second[0])) ** 0.5
        return bool(((first - second)[1:].abs() <= self.tolerance * norm).all())


def add(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, maybe in place; None: a parameter has no gradient."""
    if total is None or new is None:
        return new if total is None else total
    return total.add_(new)


def exact_bit_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return `bit_sum` as float64 [1], of which 52 bits are exact."""
    return (bit_sum(tensors) % 2**52).double()[None]


def transfer(
    mine: Tensor, length: int, *, source: int, target: int
) -> tuple[list[dist.P2POp], Tensor]:
    """Return operations that send `mine` to rank `target` and receive from rank `source`.

    mine: [B, …]. The second result is the received tensor, [length, …] in the memory format of
    `mine`, valid after the operations.
    """
    # A dense copy is sent as its memory, so that the received batch has the same strides.
    sent = torch.empty_like(mine).copy_(mine)
    shape = (length, *mine.shape[1:])
    strides = (mine[0].numel(), *sent.stride()[1:])
    received = torch.empty_strided(shape, strides, dtype=mine.dtype, device=mine.device)
    out, into = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in (sent, received))
    receive = dist.P2POp(dist.irecv, into, source, tag=TAG)
    return [receive, dist.P2POp(dist.isend, out, target, tag=TAG)], received


def machine(device: torch.device) -> str:
    """Return what decides how `device` rounds: its model; for a CPU also instructions, threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")  # on Linux
    lines = info.read_text().splitlines() if info.exists() else [platform.machine()]
    model = next((line for line in lines if line.startswith("model name")), lines[0])
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
