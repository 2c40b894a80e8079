"""Law 5: no byte at which a kill, a cut or a flip loses the last good checkpoint."""

import os
import random
import time
from pathlib import Path

import pytest
import torch
from conftest import trials
from processes import forkserver, launch, succeed
from runs import TINY, read_summary, records, train_on

from ddp_trainer.checkpoint.store import DamagedCheckpointError, read_state, write_file

KILLS = trials(50, full=200)
FLIPS = trials(50, full=200)


def lenet_state(step: int) -> dict:
    """Return a state of the size of LeNet's with momentum, its content a function of `step`."""
    random_values = torch.Generator().manual_seed(step)
    return {
        "step": step,
        "epoch": 0,
        "model": {"weight": torch.randn(2 * 431_080, generator=random_values)},
    }


def newest_step_in(folder: Path) -> int:
    return max((int(path.stem[5:]) for path in folder.glob("step-*.pt")), default=0)


def write_for_ever(folder: Path) -> None:
    """Write one checkpoint after another over two names, as fast as the disk takes them."""
    step = newest_step_in(folder)
    while True:
        step += 1
        write_file(folder / f"step-{step:08d}.pt", lenet_state(step))
        for old in sorted(folder.glob("step-*.pt"))[:-2]:
            old.unlink()


@pytest.mark.fault("SIGKILL while a checkpoint is written", times=KILLS)
def test_kills_while_checkpoints_are_written(tmp_path: Path) -> None:
    chance = random.Random(0)
    reached = []
    for _ in range(KILLS):
        before = max(reached, default=0)
        writer = forkserver().Process(target=write_for_ever, args=(tmp_path,))
        writer.start()
        while newest_step_in(tmp_path) <= before:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        writer.kill()
        writer.join()
        for path in tmp_path.glob("step-*.pt"):
            state = read_state(path)
            assert path.name == f"step-{state['step']:08d}.pt"
            assert torch.equal(
                state["model"]["weight"], lenet_state(state["step"])["model"]["weight"]
            )
            reached.append(state["step"])
        assert max(reached) > before, "the checkpoint that was there before the kill is gone"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_file(tmp_path / "step-00000001.pt", lenet_state(1))
    return tmp_path / "step-00000001.pt"


def assert_refused(checkpoint: Path, data: bytes | bytearray) -> None:
    checkpoint.write_bytes(data)
    with pytest.raises(DamagedCheckpointError):
        read_state(checkpoint)


@pytest.mark.fault("a checkpoint cut at 4 KiB, or with a bit flipped", times=FLIPS)
def test_cuts_at_every_page_and_flipped_bits(checkpoint: Path) -> None:
    data = checkpoint.read_bytes()
    chance = random.Random(0)
    for length in range(0, len(data), 4096):
        assert_refused(checkpoint, data[:length])
    for _ in range(FLIPS):
        bit = chance.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert_refused(checkpoint, flipped)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_loads(tmp_path: Path) -> None:
    overrides = (*TINY, f"output_dir={tmp_path}", "name=run", "checkpoint.every_steps=2")
    train_on(1, *overrides, "max_steps=7")
    newest = max((tmp_path / "run/checkpoints").glob("step-*.pt"))
    os.truncate(newest, newest.stat().st_size - 100)
    done = succeed(*overrides)
    assert f"checkpoint {newest} does not end with a checksum" in done.output
    assert "resumed from" in done.output
    assert read_summary(tmp_path / "run")["steps"] == 16


def test_entries_that_this_version_does_not_know_are_no_error(tmp_path: Path) -> None:
    overrides = (*TINY, f"output_dir={tmp_path}", "name=run")
    train_on(1, *overrides, "max_steps=8")
    path = tmp_path / "run/checkpoints/step-00000008.pt"
    unknown = {"one": {"best": 0.5, "history": [1, None]}, "two": {"sums": torch.ones(3)}}
    write_file(path, read_state(path) | {"later": unknown})
    train_on(2, *overrides)
    assert f"resumed from {path}" in (tmp_path / "run/train.log").read_text()
    assert read_summary(tmp_path / "run")["steps"] == 16


@pytest.mark.fault("a disk that is full at every save")
def test_a_full_disk_costs_no_training(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    overrides = (
        "model=lenet",
        "data=digits",
        "precision=fp32",
        "epochs=4",
        "checkpoint.keep_last=1",
    )
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3_900_000))
    done = launch(*overrides, f"output_dir={small_disk}", "name=run", ranks=2)
    assert done.code == 1
    assert "was not written (No space left on device)" in done.output
    assert "training continues" in done.output
    assert len(records(run_dir, "eval/top1")) == 4
    ballast.unlink()
    train_on(2, *overrides[:3], "epochs=5", f"output_dir={small_disk}", "name=run")
    assert list((run_dir / "checkpoints").glob("step-*.pt"))


def test_a_failed_write_leaves_the_file_that_was_there(checkpoint: Path) -> None:
    with pytest.raises(OSError, match="was not written"):
        write_file(checkpoint.parent / "missing" / "step-00000002.pt", lenet_state(2))
    assert read_state(checkpoint)["step"] == 1
