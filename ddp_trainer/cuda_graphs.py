"""Batches and training steps as CUDA graphs: the host launches one graph in place of 300 kernels.

A host launches a kernel in some microseconds. For small models and batches this takes longer than
the kernels themselves. A graph has recorded the kernels of a whole step with their arguments, and
the GPU runs it without gaps. The kernels are those that run without graphs.

Source: Nguyen et al., Accelerating PyTorch with CUDA Graphs, 2021 (PyTorch blog).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_trainer import registry
from ddp_trainer.config.errors import require
from ddp_trainer.config.sync import CommHook, DDPConfig, NoSyncConfig
from ddp_trainer.data.loaders import Batch, Loaders, ResidentReader, TrainLoader
from ddp_trainer.distributed.world import World
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.step import TrainStep

OWN_MODELS = ("lenet", "resnet18")
"""The models whose forward pass is known to take no decision on the host."""


def uses_graphs(config: Any, world: World) -> bool:
    """Return whether the steps of a run are captured: ``cuda_graphs``, or this choice for auto.

    config: the `Config` of the run.

    Raises:
        ConfigError: cuda_graphs is true, and the steps cannot be captured.
    """
    is_possible = can_capture(config, world)
    require(
        config.cuda_graphs is not True or is_possible,
        "cuda_graphs=true needs one rank with a GPU, sync=none or sync=ddp with"
        " sync.comm_hook=none, optimizer=sgd or adamw, check.every_steps=null and shards=null:"
        " change these, or use cuda_graphs=auto",
    )
    if config.cuda_graphs == "auto":
        return is_possible and config.model.name in OWN_MODELS and are_parts_own(config)
    return config.cuda_graphs


def can_capture(config: Any, world: World) -> bool:
    """Return whether a graph can have all that the device does in a step."""
    sync = config.sync
    sends_nothing = world.world_size == 1 and (
        isinstance(sync, NoSyncConfig)
        or (isinstance(sync, DDPConfig) and sync.comm_hook is CommHook.none)
    )
    is_whole_step = config.check.every_steps is None and config.shards is None
    has_optimizer = config.optimizer.name in ("sgd", "adamw")
    return world.device.type == "cuda" and sends_nothing and is_whole_step and has_optimizer


def are_parts_own(config: Any) -> bool:
    """Return whether all code that a step depends on is that of this package.

    A graph repeats what its first steps did. It would leave out what other code does on the host,
    for example in an observer that changes the weight decay.
    """
    parts = [(name, getattr(config, name)) for name in ("model", "loss", "optimizer")]
    parts += [("observer", observer) for observer in config.observer.values()]
    builders = [registry.choices(group)[part.name].builder for group, part in parts]
    return all(str(builder).startswith(f"{registry.__package__}.") for builder in builders)


class CapturedFunction:
    """Calls a function as usual once, captures it at the second call, and replays it from then on.

    The first call fills caches and creates state, such as that of an optimizer, because whatever a
    graph creates is created again at each replay.

    The function must read and write the same tensors at each call, and must not wait for the
    device. The results of a call are overwritten by the next one.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.stream: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.results: Any = None

    def __call__(self) -> Any:
        if self.stream is None:
            self.stream = torch.cuda.Stream()
            return self.on_stream(self.stream)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # Other threads, for example that of the checkpoint, may use the device meanwhile.
            mode = "thread_local"
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode=mode):
                self.results = self.function()
        self.graph.replay()
        return self.results

    def on_stream(self, stream: torch.cuda.Stream) -> Any:
        """Call the function on the stream of the capture, because autograd remembers streams."""
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results = self.function()
        current.wait_stream(stream)
        return results


class CapturedStep(TrainStep):
    """A training step whose work on the device is one CUDA graph. It reports no phases inside."""

    inputs: tuple[Tensor, Tensor]
    """The batch whose memory each replay reads."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        groups = self.optimizer.param_groups
        # Tensors, because a graph keeps the value of a number.
        self.rates = [torch.tensor(group["lr"], device=self.world.device) for group in groups]
        self.captured = CapturedFunction(self.compute_inputs)

    def compute(self, images: Tensor, labels: Tensor) -> Tensor:
        if self.hooks:
            return super().compute(images, labels)
        if self.captured.graph is None:
            self.inputs = images, labels
        for own, new in zip(self.inputs, (images, labels), strict=True):
            if own.data_ptr() != new.data_ptr():
                own.copy_(new)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.on_phase(Phase.forward)
        loss = self.captured()
        self.on_phase(Phase.between_steps)
        return loss

    def compute_inputs(self) -> Tensor:
        """Do what a graph records: a step with `inputs` and with the learning rates `rates`."""
        on_phase = self.on_phase
        self.on_phase = lambda phase: None
        with capturable(self.optimizer, self.rates):
            loss = super().compute(*self.inputs)
        self.on_phase = on_phase
        return loss


@contextmanager
def capturable(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """Let a graph capture a step of `optimizer` with learning rates `rates`, [], one per group."""
    is_capturing = torch.cuda.is_current_stream_capturing()
    groups = optimizer.param_groups
    numbers = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
        if "capturable" in group:  # torch's Adam warns if this is set and it is not captured
            group["capturable"] = is_capturing
    try:
        yield
    finally:
        for group, number in zip(groups, numbers, strict=True):
            group["lr"] = number
            if "capturable" in group:
                group["capturable"] = False


class CapturedLoader:
    """Yields the same batches as a `TrainLoader`: a CUDA graph gathers and augments the images.

    The images of a batch are overwritten by those of the next one.
    """

    def __init__(self, loader: TrainLoader) -> None:
        self.loader = loader
        self.sampler = loader.sampler
        self.normalize = loader.normalize
        self.row = torch.zeros(1, dtype=torch.int64, device=loader.device)
        self.ids = torch.empty(0)
        self.params: dict[str, Tensor] = {}
        self.captured = CapturedFunction(self.read)

    def __iter__(self) -> Iterator[Batch]:
        first = self.sampler.step
        ids, params = self.loader.draw_epoch()
        if not self.ids.numel():
            steps = self.sampler.steps_per_epoch
            device = self.loader.device
            self.ids = torch.zeros(steps, *ids.shape[1:], dtype=ids.dtype, device=device)
            self.params = {
                name: torch.zeros(steps, *values.shape[1:], dtype=values.dtype, device=device)
                for name, values in params.items()
            }
        self.ids[first:].copy_(ids)
        for name, values in params.items():
            self.params[name][first:].copy_(values)
        self.row.fill_(first)
        for ids in self.ids[first:].clone():
            images, labels = self.captured()
            yield Batch(images, labels, ids)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return images and labels of the batch `row`, and go on to the next row."""
        reader = self.loader.reader
        assert isinstance(reader, ResidentReader)
        ids = self.ids.index_select(0, self.row)[0]
        params = {name: values.index_select(0, self.row)[0] for name, values in self.params.items()}
        pixels = reader.pixels.index_select(0, ids)
        labels = reader.labels.index_select(0, ids)
        self.row += 1
        return self.loader.augment(pixels, labels, params, step=0)


def capture_loader(loaders: Loaders) -> Loaders:
    """Return `loaders` with a `CapturedLoader`, if a graph can read the training batches.

    A graph cannot if images are streamed, or if the host draws numbers for each batch.
    """
    loader = loaders.train
    config = loader.augmentation.config
    is_drawn_by_host = config.rand_augment or config.color_jitter or loader.augmentation.is_mixing
    if not isinstance(loader.reader, ResidentReader) or is_drawn_by_host:
        return loaders
    return replace(loaders, train=CapturedLoader(loader))  # type: ignore[arg-type]
