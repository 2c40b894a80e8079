"""Checks of a run directory: files that are damaged or contradict each other."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
import yaml

from ddp_trainer.checkpoint.file import DamagedCheckpointError, State, read_state
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.files import read_records
from ddp_trainer.training.metrics import SampleDigest
from ddp_trainer.training.summary import Summary

CHECKPOINT_KEYS = ("step", "epoch", "config", "train_samples")
"""What the checks need of a checkpoint: not its tensors, because a run has several checkpoints."""


def find_damage(run_dir: Path) -> dict[str, list[str]]:
    """Return the problems that each check finds, one text each, by the name of the check."""
    files = RunFiles(run_dir)
    return {name: list(check(files)) for name, check in CHECKS.items()}


class RunFiles:
    """The records and checkpoints of a run directory, read once for all checks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.metrics = run_dir / "metrics.jsonl"
        self.has_metrics = self.metrics.exists()
        lines = read_records(self.metrics) if self.has_metrics else ()
        self.records = [record for _, record in lines]
        self.training_steps = [record["step"] for record in self.records if "train/loss" in record]
        paths = sorted(run_dir.glob("checkpoints/*.pt"))
        self.checkpoints = {path.name: state_or_reason(path) for path in paths}
        states = [state for state in self.checkpoints.values() if not isinstance(state, str)]
        self.newest: State | None = max(states, key=lambda state: state["step"], default=None)


def state_or_reason(path: Path) -> State | str:
    """Return `CHECKPOINT_KEYS` of a checkpoint; if it is damaged or lacks one, why, as a text."""
    try:
        state = read_state(path)
    except DamagedCheckpointError as error:
        return str(error)
    missing = [key for key in CHECKPOINT_KEYS if key not in state]
    if missing:
        return f"lacks {', '.join(missing)}"
    return {key: state[key] for key in CHECKPOINT_KEYS}


def check_config(files: RunFiles) -> Iterator[str]:
    """Yield an error text if config.yaml is missing or damaged."""
    config = None
    with suppress(OSError, yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
        config = yaml.safe_load((files.run_dir / "config.yaml").read_text(errors="replace"))
    if not isinstance(config, dict):
        yield "config.yaml: missing or damaged"


def check_checkpoints(files: RunFiles) -> Iterator[str]:
    """Yield an error text for each checkpoint that is damaged or has a wrong name, or for none."""
    if not files.checkpoints:
        yield "checkpoints: there is none"
    for name, state in files.checkpoints.items():
        if isinstance(state, str):
            yield f"{name}: {state}"
        elif name not in ("best.pt", f"step-{state['step']:08d}.pt"):
            yield f"{name}: contains step {state['step']}"


def check_metrics(files: RunFiles) -> Iterator[str]:
    """Yield an error text for damaged lines and for steps that are not in order or occur twice."""
    if not files.has_metrics:
        return
    num_lines = len(files.metrics.read_text(errors="replace").splitlines())
    if num_lines != len(files.records):
        yield f"metrics.jsonl: damaged lines: {num_lines - len(files.records)}"
    for before, after in pairwise(record["step"] for record in files.records):
        if after < before:
            yield f"metrics.jsonl: step {after} follows step {before}"
    for step, count in Counter(files.training_steps).items():
        if count > 1:
            yield f"metrics.jsonl: step {step} occurs more than once"


def check_samples(files: RunFiles) -> Iterator[str]:
    """Yield an error text for each finished epoch whose samples are not the expected ones."""
    if files.newest is None or not files.has_metrics:
        return
    logged = {record.get("epoch"): record for record in files.records if "samples/digest" in record}
    for epoch in range(files.newest["epoch"]):
        if epoch not in logged:
            yield f"epoch {epoch}: metrics.jsonl has no digest of its samples"
            continue
        used = (logged[epoch]["samples/digest"], logged[epoch].get("samples/count"))
        digest, count = expected_digest(files.newest, epoch=epoch)
        if used != (digest, count):
            found = f"used {used[1]} samples, digest {used[0]}"
            yield f"epoch {epoch}: {found}; expected {count}, digest {digest}"


def check_tensorboard(files: RunFiles) -> Iterator[str]:
    """Yield an error text if TensorBoard's files and metrics.jsonl have other training steps."""
    folder = files.run_dir / "tensorboard"
    if not folder.is_dir() or not files.has_metrics:
        return
    # slow to import
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0: all steps, not a sample
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    is_logged = "train/loss" in board.Tags()["scalars"]
    steps = [event.step for event in board.Scalars("train/loss")] if is_logged else []
    if steps != files.training_steps:
        yield (
            f"tensorboard: train/loss has {len(steps)} steps, but metrics.jsonl has"
            f" {len(files.training_steps)}"
        )


def check_summary(files: RunFiles) -> Iterator[str]:
    """Yield an error text if summary.json is damaged, or later than the newest checkpoint."""
    path = files.run_dir / "summary.json"
    if files.newest is None or not path.exists():
        return
    try:
        steps = Summary.from_json(path.read_text(errors="replace")).steps
    except ValueError:
        yield "summary.json: damaged"
        return
    newest = files.newest["step"]
    if steps > newest:
        yield f"summary.json: is of step {steps}, but the newest checkpoint is of step {newest}"


CHECKS = {
    "config": check_config,
    "checkpoints": check_checkpoints,
    "metrics": check_metrics,
    "samples": check_samples,
    "tensorboard": check_tensorboard,
    "summary": check_summary,
}


def expected_digest(state: State, *, epoch: int) -> tuple[str, int]:
    """Return digest and number of the samples that `epoch` must use by the config in `state`."""
    config = state["config"]
    sampler = GlobalBatchSampler(
        range(state["train_samples"]),
        global_batch_size=config["global_batch_size"],
        num_replicas=1,
        rank=0,
        seed=config["seed"],
    )
    sampler.set_epoch(epoch)
    order = sampler.order()
    digest = SampleDigest(torch.device("cpu"))
    for step, positions in enumerate(sampler.positions()):
        digest.add(order[positions], step=step)
    total, count = digest.vector.tolist()
    return SampleDigest.text(total), count
