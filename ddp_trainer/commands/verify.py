"""Check a run directory:

    python -m ddp_trainer verify outputs/digits-resnet18-ddp

Checks that each checkpoint matches its checksum, each finished epoch used exactly the samples that
the seed selects, metrics.jsonl has its steps in order and none twice, TensorBoard has the same
training steps, config.yaml can be read, and summary.json has no later step than the newest
checkpoint. Exits with 1 if a check fails.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
import yaml

from ddp_trainer.checkpoint.file import DamagedCheckpointError, State, read_state
from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import program, wants_help
from ddp_trainer.config.errors import FAILURE, require, require_run_dir
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.files import read_records
from ddp_trainer.training.metrics import SampleDigest
from ddp_trainer.training.summary import Summary


def main(words: Sequence[str]) -> None:
    """Print the result of each check; exit with 1 if a check has found damage, with 2 for wrong
    input.
    """
    if wants_help(words):
        return print(f"usage: {program()} verify RUN_DIR\n\n{(__doc__ or '').strip()}")
    with errors_as_exit_codes():
        require(len(words) == 1, "verify takes one run directory: verify RUN_DIR")
        require_run_dir(Path(words[0]))
        findings = find_damage(Path(words[0]))
        for name, texts in findings.items():
            print("\n  ".join([f"{name:12} {'' if texts else 'ok'}", *texts]))
    sys.exit(FAILURE if any(findings.values()) else 0)


def find_damage(run_dir: Path) -> dict[str, list[str]]:
    """Return a dict from the name of each check to its list of problems, one text each, empty if
    there is none.
    """
    files = RunFiles(run_dir)
    checks = (
        check_config,
        check_checkpoints,
        check_metrics,
        check_samples,
        check_tensorboard,
        check_summary,
    )
    return {check.__name__.removeprefix("check_"): list(check(files)) for check in checks}


class RunFiles:
    """The records and checkpoints of a run directory, read once for all checks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.metrics = run_dir / "metrics.jsonl"
        self.records = (
            [record for _, record in read_records(self.metrics)] if self.metrics.exists() else []
        )
        self.training_steps = [record["step"] for record in self.records if "train/loss" in record]
        self.checkpoints = {
            path.name: read_checkpoint(path) for path in sorted(run_dir.glob("checkpoints/*.pt"))
        }
        states = [state for state in self.checkpoints.values() if not isinstance(state, str)]
        self.newest: State = max(states, key=lambda state: state["step"], default={})


def read_checkpoint(path: Path) -> State | str:
    """Return what the checks need of a checkpoint; if it is damaged or lacks a key, the reason as a
    text.
    """
    try:
        state = read_state(path)
    except DamagedCheckpointError as error:
        return str(error)
    # not the tensors: a run has several checkpoints
    keys = (
        "step",
        "epoch",
        "config",
        "train_samples",
    )
    missing = [key for key in keys if key not in state]
    return f"lacks {', '.join(missing)}" if missing else {key: state[key] for key in keys}


def check_config(files: RunFiles) -> Iterator[str]:
    """Yield an error text if config.yaml is missing or damaged."""
    with suppress(OSError, yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
        if isinstance(
            yaml.safe_load((files.run_dir / "config.yaml").read_text(errors="replace")), dict
        ):
            return
    yield "config.yaml: missing or damaged"


def check_checkpoints(files: RunFiles) -> Iterator[str]:
    """Yield an error text if no checkpoint exists, and for each that is damaged or has another step
    than its name.
    """
    if not files.checkpoints:
        yield "checkpoints: there is none"
    for name, state in files.checkpoints.items():
        if isinstance(state, str):
            yield f"{name}: {state}"
        elif name not in ("best.pt", f"step-{state['step']:08d}.pt"):
            yield f"{name}: contains step {state['step']}"


def check_metrics(files: RunFiles) -> Iterator[str]:
    """Yield an error text for damaged lines of metrics.jsonl, and for steps that are not in order
    or occur twice.
    """
    lines = files.metrics.read_text(errors="replace").splitlines() if files.metrics.exists() else []
    if damaged := len(lines) - len(files.records):
        yield f"metrics.jsonl: damaged lines: {damaged}"
    for before, after in pairwise(record["step"] for record in files.records):
        if after < before:
            yield f"metrics.jsonl: step {after} follows step {before}"
    for step, count in Counter(files.training_steps).items():
        if count > 1:
            yield f"metrics.jsonl: step {step} occurs more than once"


def check_samples(files: RunFiles) -> Iterator[str]:
    """Yield an error text for each finished epoch whose logged digest or number of samples is not
    the expected one.
    """
    logged = {record.get("epoch"): record for record in files.records if "samples/digest" in record}
    for epoch in range(files.newest["epoch"] if files.newest and files.metrics.exists() else 0):
        digest, count = expected_digest(files.newest, epoch=epoch)
        used = logged.get(epoch, {})
        if not used:
            yield f"epoch {epoch}: metrics.jsonl has no digest of its samples"
        elif (used["samples/digest"], used.get("samples/count")) != (digest, count):
            found = f"used {used.get('samples/count')} samples, digest {used['samples/digest']}"
            yield f"epoch {epoch}: {found}; expected {count}, digest {digest}"


def check_tensorboard(files: RunFiles) -> Iterator[str]:
    """Yield an error text if the run has both TensorBoard files and metrics.jsonl, and their
    training steps differ.
    """
    folder = files.run_dir / "tensorboard"
    logged = files.training_steps
    if folder.is_dir() and files.metrics.exists():
        # slow to import
        from tensorboard.backend.event_processing.event_accumulator import (
            EventAccumulator,
        )

        board = EventAccumulator(
            str(folder), size_guidance={"scalars": 0}
        ).Reload()  # 0: all steps, not a sample
        shown = (
            [event.step for event in board.Scalars("train/loss")]
            if "train/loss" in board.Tags()["scalars"]
            else []
        )
        if shown != logged:
            yield (
                f"tensorboard: train/loss has {len(shown)} steps, but metrics.jsonl has"
                f" {len(logged)}"
            )


def check_summary(files: RunFiles) -> Iterator[str]:
    """Yield an error text if summary.json is damaged, or has a later step than the newest
    checkpoint.
    """
    path = files.run_dir / "summary.json"
    state = files.newest
    try:
        steps = (
            Summary.from_json(path.read_text(errors="replace")).steps
            if state and path.exists()
            else 0
        )
        if state and steps > state["step"]:
            yield (
                f"summary.json: is of step {steps}, but the newest checkpoint is of step"
                f" {state['step']}"
            )
    except ValueError:
        yield "summary.json: damaged"


def expected_digest(state: State, *, epoch: int) -> tuple[str, int]:
    """Compute from the config in `state` which samples `epoch` must use, and return their digest
    and number.
    """
    config = state["config"]
    digest = SampleDigest(torch.device("cpu"))
    samples = range(state["train_samples"])
    size = config["global_batch_size"]
    sampler = GlobalBatchSampler(
        samples, global_batch_size=size, num_replicas=1, rank=0, seed=config["seed"]
    )
    sampler.set_epoch(epoch)
    order = sampler.order()
    for step in range(sampler.steps_per_epoch):
        digest.add(order[sampler.positions(step)], step=step)
    total, count = digest.vector.tolist()
    return SampleDigest.text(total), count
