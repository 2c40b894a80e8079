"""Check a run directory:

    python -m ddp_trainer verify outputs/digits-resnet18-ddp

Every checkpoint matches its checksum, every epoch used exactly the samples that its seed selects, metrics.jsonl and
TensorBoard have every step once, and the summary is of the last checkpoint. Exits with 1 if one of these is not so.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ddp_trainer.checkpoint.file import DamagedCheckpointError, State, parse, read_bytes
from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import program, wants_help
from ddp_trainer.config.errors import FAILURE, require
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.loggers.jsonl import read_records
from ddp_trainer.training.metrics import SampleDigest
from ddp_trainer.training.summary import Summary


def main(words: Sequence[str]) -> None:
    """Print the findings, and exit with 0 if there are none, 2 for the user's input, or 1."""
    if wants_help(words):
        print(f"usage: {program()} verify RUN_DIR\n\n{(__doc__ or '').strip()}")
        return
    with errors_as_exit_codes():
        require(len(words) == 1, "verify takes one run directory: verify RUN_DIR")
        run_dir = Path(words[0])
        is_run_dir = os.path.isfile(run_dir / "config.yaml") or os.path.isdir(run_dir / "checkpoints")
        require(is_run_dir, f"{run_dir} is not a run directory: it has neither config.yaml nor checkpoints/")
        is_good = True
        for check in CHECKS:
            findings = list(check(run_dir))
            is_good = is_good and not findings
            print("\n  ".join([f"{check.__name__.removeprefix('check_'):12} {'' if findings else 'ok'}", *findings]))
    sys.exit(0 if is_good else FAILURE)


def check_config(run_dir: Path) -> Iterator[str]:
    """Yield the finding that config.yaml cannot be read."""
    try:
        is_good = isinstance(yaml.safe_load((run_dir / "config.yaml").read_text(errors="replace")), dict)
    except (OSError, yaml.YAMLError):
        is_good = False
    if not is_good:
        yield "config.yaml: missing or damaged"


def check_checkpoints(run_dir: Path) -> Iterator[str]:
    """Yield the checkpoints that are damaged or have the wrong name."""
    checkpoints = list(read_checkpoints(run_dir))
    if not checkpoints:
        yield "checkpoints: there is none"
    for path, state in checkpoints:
        if isinstance(state, str):
            yield f"{path.name}: {state}"
        elif path.name not in ("best.pt", f"step-{state['step']:08d}.pt"):
            yield f"{path.name}: contains step {state['step']}"


def check_metrics(run_dir: Path) -> Iterator[str]:
    """Yield damaged lines of metrics.jsonl, and steps that go back or occur twice."""
    records, last, steps = metric_records(run_dir), -1, set()
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    if len(lines) > len(records):
        yield f"metrics.jsonl: damaged lines: {len(lines) - len(records)}"
    for record in records:
        if record["step"] < last:
            yield f"metrics.jsonl: step {record['step']} after step {last}"
        last = max(last, record["step"])
        if "train/loss" in record:
            if record["step"] in steps:
                yield f"metrics.jsonl: step {record['step']} occurs twice"
            steps.add(record["step"])


def check_samples(run_dir: Path) -> Iterator[str]:
    """Yield the epochs that did not use each of the samples that the seed selects once."""
    state = newest_state(run_dir)
    if state is None or not (run_dir / "metrics.jsonl").exists():
        return
    records = {record.get("epoch"): record for record in metric_records(run_dir) if "samples/digest" in record}
    for epoch in range(state["epoch"]):
        if epoch not in records:
            yield f"epoch {epoch}: metrics.jsonl has no digest of its samples"
            continue
        digest, count = expected_digest(state, epoch=epoch)
        logged = records[epoch]["samples/digest"], records[epoch].get("samples/count")
        if logged != (digest, count):
            yield f"epoch {epoch}: used {logged[1]} samples, digest {logged[0]}; expected {count}, digest {digest}"


def check_tensorboard(run_dir: Path) -> Iterator[str]:
    """Yield a difference between the steps of TensorBoard and of metrics.jsonl, if the run has both."""
    if not (run_dir / "tensorboard").is_dir() or not (run_dir / "metrics.jsonl").exists():
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to import

    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    shown = [event.step for event in board.Scalars("train/loss")] if "train/loss" in board.Tags()["scalars"] else []
    logged = [record["step"] for record in metric_records(run_dir) if "train/loss" in record]
    if shown != logged:
        yield f"tensorboard: train/loss has {len(shown)} steps, and in metrics.jsonl {len(logged)}"


def check_summary(run_dir: Path) -> Iterator[str]:
    """Yield a difference between summary.json and the newest checkpoint."""
    path, state = run_dir / "summary.json", newest_state(run_dir)
    if not path.exists() or state is None:
        return
    try:
        steps = Summary.from_json(path.read_text(errors="replace")).steps
    except ValueError:
        yield "summary.json: damaged"
    else:
        if steps > state["step"]:
            yield f"summary.json: of step {steps}, and the newest checkpoint is of step {state['step']}"


CHECKS: list[Callable[[Path], Iterator[str]]] = [
    check_config,
    check_checkpoints,
    check_metrics,
    check_samples,
    check_tensorboard,
    check_summary,
]


def read_checkpoints(run_dir: Path) -> Iterator[tuple[Path, State | str]]:
    """Yield each checkpoint with its state, or with the reason why it cannot be used."""
    for path in sorted((run_dir / "checkpoints").glob("*.pt")):
        try:
            state = parse(read_bytes(path))
        except DamagedCheckpointError as error:
            yield path, str(error)
        else:
            missing = {"config", "epoch", "train_samples"} - state.keys()
            yield path, f"lacks {', '.join(sorted(missing))}" if missing else state


def newest_state(run_dir: Path) -> State | None:
    """Return the good checkpoint of the highest step."""
    states = [state for _, state in read_checkpoints(run_dir) if not isinstance(state, str)]
    return max(states, key=lambda state: state["step"], default=None)


def metric_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the undamaged records of metrics.jsonl; none without the file."""
    path = run_dir / "metrics.jsonl"
    return [record for _, record in read_records(path)] if path.exists() else []


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
