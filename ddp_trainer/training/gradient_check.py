"""The check for silent corruption: gradients are computed again on another rank and compared before
they are used.
"""

import platform
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ddp_trainer.config.errors import require
from ddp_trainer.distributed.seeding import derive_seed, seed_device
from ddp_trainer.sync.base import start_exchange
from ddp_trainer.training.metrics import DesynchronizedError, rank_outside_majority
from ddp_trainer.training.step import TrainStep

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""By dtype: the largest difference of two sums over a gradient that rounding explains, divided by
its norm.
"""
TAG = 1
"""The tag of this check's messages. It keeps them apart from messages that the strategy sends at
the same time.
"""


class CorruptionError(DesynchronizedError):
    """A rank computed another gradient than another rank from the same images, or has other
    parameters.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class GradientCheck:
    """Compares the gradient of each rank with the gradient that the next rank computes from the
    same images.

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
        self.checked = step.count
        """The number of the last step that was checked, or of the step after which this launch
        began.
        """
        self._prints: dict[Tensor, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._batch: Callable[[], tuple[Tensor, Tensor]] | None = None

    def begin(self, step: int) -> None:
        """Continue after optimizer step `step`."""
        self.checked = step

    @property
    def is_due(self) -> bool:
        """Whether to check the next step: every `every_steps` steps, postponed while the ranks'
        parameters differ.
        """
        is_later = (self.step.count + 1) // self.every_steps > self.checked // self.every_steps
        return is_later and self.step.sync.is_synchronized

    def watch(self, images: Tensor, labels: Tensor) -> None:
        """Register hooks that record each gradient of this rank after backward has computed it,
        before it is averaged.

        Also begin to send the batch to the next rank. The transfer goes on while this rank computes
        the step.
        """

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._prints[parameter] = self.describe(parameter.grad)

        self._prints.clear()
        self._batch = self.start_shift(images, labels, shift=1)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(take) for parameter in self.parameters
        ]

    def compare(self, images: Tensor, labels: Tensor) -> None:
        """Compare each rank's gradient with the next rank's for the same images, and the parameters
        of all ranks.

        images, labels: this rank's batch, as given to `watch`. Collective: every rank must call
        this.

        Raises:
            CorruptionError: on all ranks, if gradients for the same images differ, or ranks'
            parameters differ.
        """
        for hook in self._hooks:
            hook.remove()
        self.checked = self.step.count + 1
        own = self.combine([self._prints.get(parameter) for parameter in self.parameters])
        assert self._batch is not None
        again = self.recompute(*self._batch(), shift=1)
        self._batch = None
        model = bit_sum([parameter.detach() for parameter in self.parameters]).double()[None]
        table = torch.stack(self.world.all_gather(torch.cat([own, again, model]))).cpu()
        size = len(own)
        owns = table[:, :size]
        agains = table[:, size : 2 * size].roll(-1, 0)
        models = table[:, -1].tolist()
        if len(set(models)) > 1:
            self.fail(rank_outside_majority(models), "holds other parameters than the rest")
        differing = [
            rank for rank in range(len(owns)) if not self.are_equal(owns[rank], agains[rank])
        ]
        if differing:
            again = self.recompute(*self.start_shift(images, labels, shift=2)(), shift=2)
            third = torch.stack(self.world.all_gather(again)).cpu().roll(-2, 0)
            self.decide(owns, agains, third, differing)

    def decide(self, own: Tensor, second: Tensor, third: Tensor, differing: Sequence[int]) -> None:
        """Raise CorruptionError, which names the rank with wrong gradients, or no rank if the
        results do not show it.

        own, second, third: float64 [W, n], W = world size. Row r has results of `combine` for the
        batch of rank r: in `own` the result of rank r, in `second` that of rank r + 1, in `third`
        that of rank r + 2 (modulo W). differing: the numbers of the rows in which `own` and
        `second` differ.
        """
        votes: Counter[int] = Counter()
        ranks = self.world.world_size
        for rank in differing:
            if self.are_equal(second[rank], third[rank]):
                votes[rank] += 1
            elif ranks > 2:
                is_own_good = self.are_equal(own[rank], third[rank])
                votes.update([(rank + 1) % ranks] if is_own_good else [rank, (rank + 1) % ranks])
        (rank, count), *others = [*votes.most_common(), (None, 0)]
        is_clear = others != [] and others[0][1] < count
        self.fail(
            rank if is_clear else None,
            "computed another gradient than other ranks from the same images",
        )

    def fail(self, rank: int | None, what: str) -> None:
        """Raise CorruptionError, whose message says that `rank` (None: an unknown rank)
        did `what`.
        """
        hosts = ", ".join(dict.fromkeys(self.hosts))
        who = (
            f"rank {rank} on {self.hosts[rank]}"
            if rank is not None
            else f"one of the ranks (on {hosts})"
        )
        raise CorruptionError(
            f"{who} {what}, in step {self.step.count + 1}: nothing of this step was used or saved;"
            " the cause is faulty memory, a faulty processor, or code that is not deterministic",
            rank,
        )

    def start_shift(
        self, images: Tensor, labels: Tensor, *, shift: int
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin to send the batch to rank r + `shift`; return a function that waits for the batch
        of rank r - `shift`.

        The function returns it. r is this rank. images: [B, C, H, W], labels: [B] or [B, classes];
        B differs by rank.
        """
        rank = self.world.rank
        ranks = self.world.world_size
        source = (rank - shift) % ranks
        target = (rank + shift) % ranks
        if source == rank:
            return lambda: (images, labels)
        length = len(range(source, self.step.settings.global_batch_size, ranks))
        image_operations, received_images = transfer(images, length, source=source, target=target)
        label_operations, received_labels = transfer(labels, length, source=source, target=target)
        requests = start_exchange([*image_operations, *label_operations])

        def wait() -> tuple[Tensor, Tensor]:
            for request in requests:
                request.wait()
            return received_images, received_labels

        return wait

    def recompute(self, images: Tensor, labels: Tensor, *, shift: int) -> Tensor:
        """Return the result of `combine` for the gradient of the batch of rank r - `shift`, where r
        is this rank.
        """
        step = self.step
        world = self.world
        source = (world.rank - shift) % world.world_size
        buffers = [buffer.clone() for buffer in step.model.buffers()]
        seed_device(
            world.device, derive_seed(step.settings.seed, step=step.count, purpose=f"rank {source}")
        )
        total: list[Tensor | None] = [None] * len(self.parameters)
        for part in step.split(images, labels):
            loss, *_ = step.loss(step.model, *part)
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            total = [
                new if old is None else old if new is None else old.add_(new)
                for old, new in zip(total, found, strict=True)
            ]
        with torch.no_grad():
            for buffer, kept in zip(step.model.buffers(), buffers, strict=True):
                buffer.copy_(kept)
        return self.combine(
            [None if gradient is None else self.describe(gradient) for gradient in total]
        )

    def describe(self, gradient: Tensor) -> Tensor:
        """Return sums that are compared in place of `gradient`: float64 [1] for bitwise comparison,
        else [3].
        """
        if self.tolerance is None:
            return bit_sum([gradient]).double()[None]
        flat = gradient.detach().double().contiguous().view(-1)
        signs = 1 - 2 * ((torch.arange(len(flat), device=flat.device) * 2654435761 >> 16) % 2)
        # sums of the squares, of the elements, and of the elements with pseudo-random signs
        return torch.stack([flat.square().sum(), flat.sum(), (flat * signs).sum()])

    def combine(self, prints: Sequence[Tensor | None]) -> Tensor:
        """Return one vector from `prints`, the results of `describe` for all parameters; None: no
        gradient.
        """
        empty = torch.zeros(
            1 if self.tolerance is None else 3, dtype=torch.float64, device=self.world.device
        )
        vectors = [empty if one is None else one for one in prints]
        return torch.cat(vectors) if self.tolerance is None else torch.stack(vectors).sum(0)

    def are_equal(self, first: Tensor, second: Tensor) -> bool:
        """Return whether two vectors from `combine` are equal: bitwise, or up to rounding if there
        is a tolerance.
        """
        if self.tolerance is None:
            return torch.equal(first, second)
        # fp16 gradients sometimes overflow
        if not (first.isfinite().all() and second.isfinite().all()):
            return bool(first.isfinite().all() == second.isfinite().all())
        norm = max(float(first[0]), float(second[0])) ** 0.5
        return bool(((first - second)[1:].abs() <= self.tolerance * norm).all())


def bit_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the bit patterns of float32 `tensors`, as int64 []. A change of any single
    bit changes it.
    """
    parts = [tensor.detach().float().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(parts).sum() % 2**52  # a float64 holds it exactly


def transfer(
    mine: Tensor, length: int, *, source: int, target: int
) -> tuple[list[dist.P2POp], Tensor]:
    """Return the operations that send `mine` to rank `target` and receive from rank `source`, and
    the received tensor.

    mine: [B, …]. The received tensor is [length, …], in the memory format of `mine`, and valid
    after the operations.
    """
    # With one channel both formats are contiguous, and only the strides show which one it is.
    is_channels_last = (
        mine.ndim == 4
        and mine.stride(1) == 1
        and mine.is_contiguous(memory_format=torch.channels_last)
    )
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    received = torch.empty(
        length, *mine.shape[1:], dtype=mine.dtype, device=mine.device, memory_format=layout
    )
    out, into = (
        part.permute(0, 2, 3, 1) if is_channels_last else part for part in (mine, received)
    )
    receive = dist.P2POp(dist.irecv, into, source, tag=TAG)
    return [receive, dist.P2POp(dist.isend, out.contiguous(), target, tag=TAG)], received


def machine(device: torch.device) -> str:
    """Return the properties that decide how `device` rounds: its model, and for a CPU the
    instructions and threads.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
