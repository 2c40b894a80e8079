"""Check a run directory:

    python -m ddp_trainer verify outputs/digits-resnet18-ddp

Every checkpoint matches its checksum, every epoch used exactly the samples that its seed selects, metrics.jsonl and
TensorBoard have every step once, and the summary is of the last checkpoint. Exits with 1 if one of these is not so.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from ddp_trainer.checkpoint.file import DamagedCheckpointError, State, read_state
from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import program, wants_help
from ddp_trainer.config.errors import FAILURE, require, require_run_dir
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.distributed.files import read_records
from ddp_trainer.training.metrics import SampleDigest
from ddp_trainer.training.summary import Summary


def main(words: Sequence[str]) -> None:
    """Print the findings; exit with 1 if there are any, with 2 if the user's input is wrong."""
    if wants_help(words):
        print(f"usage: {program()} verify RUN_DIR\n\n{(__doc__ or '').strip()}")
        return
    with errors_as_exit_codes():
        require(len(words) == 1, "verify takes one run directory: verify RUN_DIR")
        run_dir = Path(words[0])
        require_run_dir(run_dir)
        findings = {check.__name__.removeprefix("check_"): list(check(run_dir)) for check in CHECKS}
        for name, texts in findings.items():
            print("\n  ".join([f"{name:12} {'' if texts else 'ok'}", *texts]))
    sys.exit(FAILURE if any(findings.values()) else 0)


def check_config(run_dir: Path) -> Iterator[str]:
    """Yield the finding that config.yaml cannot be read."""
    with suppress(OSError, yaml.YAMLError):
        if isinstance(yaml.safe_load((run_dir / "config.yaml").read_text(errors="replace")), dict):
            return
    yield "config.yaml: missing or damaged"


def check_checkpoints(run_dir: Path) -> Iterator[str]:
    """Yield the checkpoints that are damaged or have the wrong name."""
    checkpoints = read_checkpoints(run_dir)
    if not checkpoints:
        yield "checkpoints: there is none"
    for name, state in checkpoints.items():
        if isinstance(state, str):
            yield f"{name}: {state}"
        elif name not in ("best.pt", f"step-{state['step']:08d}.pt"):
            yield f"{name}: contains step {state['step']}"


def check_metrics(run_dir: Path) -> Iterator[str]:
    """Yield damaged lines of metrics.jsonl, and steps that go back or occur twice."""
    path, records = run_dir / "metrics.jsonl", metric_records(run_dir)
    damaged = len(path.read_text(errors="replace").splitlines()) - len(records) if path.exists() else 0
    if damaged:
        yield f"metrics.jsonl: damaged lines: {damaged}"
    for before, after in pairwise(record["step"] for record in records):
        if after < before:
            yield f"metrics.jsonl: step {after} after step {before}"
    for step, count in Counter(training_steps(records)).items():
        if count > 1:
            yield f"metrics.jsonl: step {step} occurs twice"


def check_samples(run_dir: Path) -> Iterator[str]:
    """Yield the epochs that did not use each of the samples that the seed selects once."""
    state = newest_state(run_dir)
    logged = {record.get("epoch"): record for record in metric_records(run_dir) if "samples/digest" in record}
    for epoch in range(state["epoch"] if state and (run_dir / "metrics.jsonl").exists() else 0):
        digest, count = expected_digest(state, epoch=epoch)
        used = logged.get(epoch, {})
        if not used:
            yield f"epoch {epoch}: metrics.jsonl has no digest of its samples"
        elif (used["samples/digest"], used.get("samples/count")) != (digest, count):
            found = f"used {used.get('samples/count')} samples, digest {used['samples/digest']}"
            yield f"epoch {epoch}: {found}; expected {count}, digest {digest}"


def check_tensorboard(run_dir: Path) -> Iterator[str]:
    """Yield a difference between the steps of TensorBoard and of metrics.jsonl, if the run has both."""
    if (run_dir / "tensorboard").is_dir() and (run_dir / "metrics.jsonl").exists():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to import

        board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
        shown = [event.step for event in board.Scalars("train/loss")] if "train/loss" in board.Tags()["scalars"] else []
        logged = training_steps(metric_records(run_dir))
        if shown != logged:
            yield f"tensorboard: train/loss has {len(shown)} steps, and in metrics.jsonl {len(logged)}"


def check_summary(run_dir: Path) -> Iterator[str]:
    """Yield a difference between summary.json and the newest checkpoint."""
    path, state = run_dir / "summary.json", newest_state(run_dir)
    try:
        steps = Summary.from_json(path.read_text(errors="replace")).steps if state and path.exists() else 0
        if state and steps > state["step"]:
            yield f"summary.json: of step {steps}, and the newest checkpoint is of step {state['step']}"
    except ValueError:
        yield "summary.json: damaged"


CHECKS = [check_config, check_checkpoints, check_metrics, check_samples, check_tensorboard, check_summary]


def read_checkpoints(run_dir: Path) -> dict[str, State | str]:
    """Return the state of each checkpoint by file name, or the reason why it cannot be used."""
    checkpoints: dict[str, State | str] = {}
    for path in sorted((run_dir / "checkpoints").glob("*.pt")):
        try:
            state = read_state(path)
            missing = {"config", "epoch", "train_samples"} - state.keys()
            checkpoints[path.name] = f"lacks {', '.join(sorted(missing))}" if missing else state
        except DamagedCheckpointError as error:
            checkpoints[path.name] = str(error)
    return checkpoints


def newest_state(run_dir: Path) -> State:
    """Return the good checkpoint of the highest step; empty if there is none."""
    states = [state for state in read_checkpoints(run_dir).values() if not isinstance(state, str)]
    return max(states, key=lambda state: state["step"], default={})


def metric_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the undamaged records of metrics.jsonl; none without the file."""
    path = run_dir / "metrics.jsonl"
    return [record for _, record in read_records(path)] if path.exists() else []


def training_steps(records: list[dict[str, Any]]) -> list[int]:
    """Return the steps at which the training loss was recorded."""
    return [record["step"] for record in records if "train/loss" in record]


def expected_digest(state: State, *, epoch: int) -> tuple[str, int]:
    """Return the digest and number of samples of a whole epoch, computed from the seed."""
    config, digest = state["config"], SampleDigest(torch.device("cpu"))
    samples, size = range(state["train_samples"]), config["global_batch_size"]
    sampler = GlobalBatchSampler(samples, global_batch_size=size, num_replicas=1, rank=0, seed=config["seed"])
    sampler.set_epoch(epoch)
    order = sampler.order()
    for step in range(sampler.steps_per_epoch):
        digest.add(order[sampler.positions(step)], step=step)
    total, count = digest.vector.tolist()
    return SampleDigest.text(total), count
