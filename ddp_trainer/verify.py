"""``python -m ddp_trainer.verify RUN_DIR``: check a run directory after the fact.

Every checkpoint matches its checksum, every epoch used exactly the samples that its seed says, every step is told
once in metrics.jsonl and in TensorBoard, and the summary is of the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from ddp_trainer.checkpoint import DamagedCheckpointError, State, parse, read_bytes
from ddp_trainer.data import GlobalBatchSampler
from ddp_trainer.metrics import Ledger

Record = dict[str, Any]


def expected_digest(state: State, *, epoch: int) -> tuple[str, int]:
    """Return the digest and number of samples of a whole `epoch`, computed from the seed alone."""
    config, ledger = state["config"], Ledger(torch.device("cpu"))
    sampler = GlobalBatchSampler(
        range(state["train_samples"]),
        global_batch_size=config["global_batch_size"],
        num_replicas=1,
        rank=0,
        seed=config["seed"],
    )
    sampler.set_epoch(epoch)
    for step in range(sampler.steps_per_epoch):
        ledger.add(sampler.order()[sampler.positions(step)], step=step)
    total, count = ledger.vector.tolist()
    return Ledger.text(total), count


def read_checkpoints(run_dir: Path) -> Iterator[tuple[Path, State | str]]:
    """Yield each checkpoint with its state, or with what is wrong with it."""
    for path in sorted((run_dir / "checkpoints").glob("*.pt")):
        try:
            yield path, parse(read_bytes(path))
        except DamagedCheckpointError as error:
            yield path, str(error)


def check_checkpoints(run_dir: Path) -> Iterator[str]:
    """Yield what is wrong with the checkpoints: damage, names that lie, files left half-written."""
    found = list(read_checkpoints(run_dir))
    if not found:
        yield "checkpoints: there is none"
    for path, state in found:
        if isinstance(state, str):
            yield f"{path.name}: {state}"
        elif path.name != "best.pt" and path.name != f"step-{state['step']:08d}.pt":
            yield f"{path.name}: holds step {state['step']}"


def check_metrics(run_dir: Path) -> Iterator[str]:
    """Yield what is wrong with metrics.jsonl: cut lines, steps that go back, steps told twice."""
    last, told = -1, set()
    for number, line in enumerate((run_dir / "metrics.jsonl").read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            yield f"metrics.jsonl:{number}: not a whole record"
            continue
        if record["step"] < last:
            yield f"metrics.jsonl:{number}: step {record['step']} after step {last}"
        if "train/loss" in record and record["step"] in told:
            yield f"metrics.jsonl:{number}: step {record['step']} is told twice"
        told |= {record["step"]} if "train/loss" in record else set()
        last = max(last, record["step"])


def check_ledger(run_dir: Path) -> Iterator[str]:
    """Yield each epoch whose samples were not those that the seed asks for, each once."""
    state = newest_state(run_dir)
    if state is None:
        return
    ledgers: dict[int, Record] = {record["epoch"]: record for record in records(run_dir) if "ledger/digest" in record}
    for epoch in range(state["epoch"]):
        if epoch not in ledgers:
            yield f"ledger: epoch {epoch} has no record"
            continue
        digest, count = expected_digest(state, epoch=epoch)
        found = ledgers[epoch]["ledger/digest"], ledgers[epoch]["ledger/samples"]
        if found != (digest, count):
            yield f"ledger: epoch {epoch} used {found[1]} samples, digest {found[0]}; expected {count}, {digest}"


def check_tensorboard(run_dir: Path) -> Iterator[str]:
    """Yield what TensorBoard would show otherwise than metrics.jsonl tells."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    shown = [event.step for event in board.Scalars("train/loss")] if "train/loss" in board.Tags()["scalars"] else []
    told = [record["step"] for record in records(run_dir) if "train/loss" in record]
    if shown != told:
        yield f"tensorboard: train/loss has {len(shown)} steps where metrics.jsonl has {len(told)}"


def check_summary(run_dir: Path) -> Iterator[str]:
    """Yield what summary.json says otherwise than the newest checkpoint."""
    path, state = run_dir / "summary.json", newest_state(run_dir)
    if path.exists() and state is not None and json.loads(path.read_text())["steps"] > state["step"]:
        yield f"summary.json: of step {json.loads(path.read_text())['steps']}, the newest checkpoint of {state['step']}"


def check_config(run_dir: Path) -> Iterator[str]:
    """Yield what is wrong with config.yaml."""
    if not isinstance(yaml.safe_load((run_dir / "config.yaml").read_text()), dict):
        yield "config.yaml: not a mapping"


def records(run_dir: Path) -> list[Record]:
    """Return the whole records of metrics.jsonl."""
    whole = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        try:
            whole.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # check_metrics tells of it
    return whole


def newest_state(run_dir: Path) -> State | None:
    """Return the good checkpoint of the highest step."""
    states = [state for _, state in read_checkpoints(run_dir) if not isinstance(state, str)]
    return max(states, key=lambda state: state["step"], default=None)


CHECKS: list[Callable[[Path], Iterator[str]]] = [
    check_config,
    check_checkpoints,
    check_metrics,
    check_ledger,
    check_tensorboard,
    check_summary,
]


def main() -> None:
    """Print what was found and exit 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="ddp_trainer.verify", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a directory that holds config.yaml and checkpoints/")
    run_dir = parser.parse_args().run_dir
    if not (run_dir / "config.yaml").is_file():
        parser.error(f"{run_dir} is not a run directory: it has no config.yaml")
    problems = 0
    for check in CHECKS:
        found = list(check(run_dir))
        problems += len(found)
        print(f"{check.__name__.removeprefix('check_'):12} {'ok' if not found else ''}")
        for problem in found:
            print(f"  {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
