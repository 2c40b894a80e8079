"""Checks of a run directory: files that are damaged or contradict each other."""

import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ddp_trainer.checkpoint.file import DamagedCheckpointError, State, read_state
from ddp_trainer.config.errors import printable
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.tools.folder_reader import FolderReader, text, whole
from ddp_trainer.training.metrics import SampleDigest

MAX_SAMPLES = 2**27
"""More samples than any data set of images in files has; their order needs 1 GiB of memory."""
MAX_EPOCHS = 100_000
CHUNK = 4096
"""Number of steps whose samples are hashed at once."""
CHECKPOINT_KEYS = ("step", "epoch", "config", "train_samples")
"""The entries of a checkpoint that are kept for the checks; the tensors would need much memory."""


def find_damage(run_dir: Path) -> dict[str, list[str]]:
    """Return, for the name of each check, a list with a text for each problem; []: no problem."""
    files = RunFiles(run_dir)
    return {name: list(check(files)) for name, check in CHECKS.items()}


class RunFiles:
    """The records and checkpoints of a run directory, read once for all checks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        reader = FolderReader(run_dir)
        reader.read_object("config.yaml", dict)
        self.summary = reader.read_object("summary.json", dict)
        self.records = list(reader.read_json_lines("metrics.jsonl"))
        self.has_metrics = os.path.exists(run_dir / "metrics.jsonl")
        self.training_steps = [record["step"] for record in self.records if "train/loss" in record]
        self.damaged_files = reader.problems
        self.damaged_checkpoints: list[str] = []
        self.states: dict[str, State] = {}
        """`CHECKPOINT_KEYS` of each good checkpoint, by the name of its file."""
        for path in sorted(run_dir.glob("checkpoints/*.pt")):
            try:
                state = read_state(path)
                kept = {key: state[key] for key in CHECKPOINT_KEYS}
                check_numbers(kept)
                self.states[path.name] = kept
            except DamagedCheckpointError as error:
                self.damaged_checkpoints.append(f"{path.name}: {error}")
            except KeyError as error:
                self.damaged_checkpoints.append(f"{path.name}: lacks {error}")
        self.newest = max(self.states.values(), key=itemgetter("step"), default=None)


def check_numbers(state: State) -> None:
    """Check the numbers from which the samples of an epoch follow.

    Raises:
        KeyError: the config lacks one.
        DamagedCheckpointError: one is no number that a training could have.
    """
    config = state["config"]
    batch = config["global_batch_size"]
    count = state["train_samples"]
    are_whole = all(type(number) is int for number in (batch, count, config["seed"]))
    if not are_whole or not 0 < batch <= count < MAX_SAMPLES:
        raise DamagedCheckpointError(f"has {count} samples in batches of {batch}"[:100])
    if state["epoch"] > min(state["step"], MAX_EPOCHS):
        raise DamagedCheckpointError(f"has {state['epoch']} epochs in {state['step']} steps"[:100])


def check_files(files: RunFiles) -> Iterator[str]:
    """Yield an error text for each damaged text file, and one if config.yaml is missing."""
    yield from files.damaged_files
    if not os.path.exists(files.run_dir / "config.yaml"):
        yield "config.yaml is missing."


def check_checkpoints(files: RunFiles) -> Iterator[str]:
    """Yield an error text for each damaged or wrongly named checkpoint, and one if none is good."""
    yield from files.damaged_checkpoints
    if not files.states:
        yield "checkpoints: there is no good one"
    for name, state in files.states.items():
        if name not in ("best.pt", f"step-{state['step']:08d}.pt"):
            yield f"{name}: contains step {state['step']}"


def check_metrics(files: RunFiles) -> Iterator[str]:
    """Yield an error text for each step that is out of order and each repeated training step."""
    for before, after in pairwise(record["step"] for record in files.records):
        if after < before:
            yield f"metrics.jsonl: step {after} follows step {before}"
    for step, count in Counter(files.training_steps).items():
        if count > 1:
            yield f"metrics.jsonl: step {step} occurs more than once"


def check_samples(files: RunFiles) -> Iterator[str]:
    """Yield an error text for each finished epoch whose samples are not the expected ones.

    How often data.sampling draws a sample depends on the data set, which is not examined.
    """
    if files.newest is None or not files.has_metrics or not is_uniform(files.newest["config"]):
        return
    logged = {
        epoch: record
        for record in files.records
        if "samples/digest" in record and (epoch := whole(record.get("epoch"))) is not None
    }
    for epoch in range(files.newest["epoch"]):
        if epoch not in logged:
            yield f"epoch {epoch}: metrics.jsonl has no digest of its samples"
            if not any(other > epoch for other in logged):
                return  # nor of later epochs
            continue
        used = (logged[epoch]["samples/digest"], logged[epoch].get("samples/count"))
        digest, count = expected_digest(files.newest, epoch=epoch)
        if used != (digest, count):
            found = f"used {printable(text(used[1]))} samples, digest {printable(text(used[0]))}"
            yield f"epoch {epoch}: {found}; expected {count}, digest {digest}"


def is_uniform(config: dict[str, Any]) -> bool:
    """Return whether each sample is drawn once in an epoch."""
    data = config.get("data")
    return not isinstance(data, dict) or data.get("sampling", "uniform") == "uniform"


def check_tensorboard(files: RunFiles) -> Iterator[str]:
    """Yield an error text if TensorBoard and metrics.jsonl have different training steps."""
    folder = files.run_dir / "tensorboard"
    if not os.path.isdir(folder) or not files.has_metrics:
        return
    # Imported here, because the import is slow.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    try:
        # 0 loads all steps; the default loads a random sample of the steps.
        board = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    except OSError as error:
        yield f"tensorboard: cannot be read ({error.strerror})"
        return
    is_logged = "train/loss" in board.Tags()["scalars"]
    steps = [event.step for event in board.Scalars("train/loss")] if is_logged else []
    if steps != files.training_steps:
        yield (
            f"tensorboard: train/loss has {len(steps)} steps, but metrics.jsonl has"
            f" {len(files.training_steps)}"
        )


def check_summary(files: RunFiles) -> Iterator[str]:
    """Yield an error text if summary.json has a later step than the newest checkpoint."""
    steps = whole(files.summary.get("steps")) or 0
    if files.newest is not None and steps > files.newest["step"]:
        newest = files.newest["step"]
        yield f"summary.json: is of step {steps}, but the newest checkpoint is of step {newest}"


CHECKS = {
    "files": check_files,
    "checkpoints": check_checkpoints,
    "metrics": check_metrics,
    "samples": check_samples,
    "tensorboard": check_tensorboard,
    "summary": check_summary,
}


def expected_digest(state: State, *, epoch: int) -> tuple[str, int]:
    """Return digest and number of the samples that the config in `state` selects for `epoch`."""
    config = state["config"]
    sampler = GlobalBatchSampler(
        state["train_samples"],
        global_batch_size=config["global_batch_size"],
        seed=config["seed"],
    )
    sampler.set_epoch(epoch)
    batches = sampler.global_batches()
    digest = SampleDigest(torch.device("cpu"))
    for begin in range(0, len(batches), CHUNK):
        digest.add(batches[begin : begin + CHUNK], step=begin)
        _ = digest.vector  # hashes these steps
    total, count = digest.vector.tolist()
    return SampleDigest.text(total), count
