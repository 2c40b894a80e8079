"""Damaged or other files in a run directory and in the data: nothing good is lost, and no other
data is used.
"""

import errno
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import trials
from processes import (
    forkserver,
    launch,
    on_ranks,
    run_command,
    start_command,
    succeed,
    torchrun,
    wait_for,
)
from runs import (
    TINY,
    compose,
    newest_checkpoint,
    newest_step,
    read_summary,
    records,
    train,
    train_on,
)

from ddp_trainer.checkpoint.file import State, read_state, write_file
from ddp_trainer.checkpoint.run_dir import check_config_file
from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.files import lock_file

FAULTY = str(Path(__file__).with_name("faulty.py"))


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.fault(
    "the newest checkpoint damaged, the best one copied to an older step, then a kill"
)
def test_retention_keeps_what_is_good(tmp_path: Path) -> None:
    words = (
        *TINY,
        f"output_dir={tmp_path}",
        "name=run",
        "checkpoint.every_steps=2",
        "checkpoint.keep_last=1",
    )
    train_on(1, *words, "max_steps=12")
    newest = tmp_path / "run/checkpoints/step-00000012.pt"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    shutil.copy(tmp_path / "run/checkpoints/best.pt", newest.with_name("step-00000008.pt"))
    done = run_command([sys.executable, FAULTY, *words], FAULT="kill:0:11")
    assert done.code == -signal.SIGKILL, done.output
    assert newest_step(tmp_path / "run") in (8, 10), "10 may not have been on disk yet"
    assert "step-00000012.pt.damaged" in checkpoints(tmp_path / "run")
    succeed(*words, "resume=must")
    assert read_summary(tmp_path / "run")["steps"] == 16


BEST_KILLS = trials(25, full=100)


@pytest.mark.fault("SIGKILL while best.pt is replaced", times=BEST_KILLS)
def test_a_kill_loses_no_best_checkpoint(tmp_path: Path) -> None:
    best = tmp_path / "best.pt"
    for number in range(BEST_KILLS):
        before = read_state(best)["step"] if best.exists() else 0
        writer = forkserver().Process(target=write_best_for_ever, args=(tmp_path, before))
        writer.start()
        wait_for(lambda: best.exists() and read_state(best)["step"] > before)  # noqa: B023 - called at once
        time.sleep(number / BEST_KILLS / 200)
        writer.kill()
        writer.join()
        assert read_state(best)["step"] > before


def write_best_for_ever(folder: Path, step: int) -> None:
    while True:
        step += 1
        for name in ("best.pt", f"step-{step % 2}.pt"):
            state = {"step": step, "epoch": 0, "config": {"zeros": np.zeros(9).tolist()}}
            write_file(folder / name, state)


def without(key: str) -> Callable[[State], State]:
    return lambda state: {name: value for name, value in state.items() if name != key}


CONTENTS: dict[str, Callable[[State], State]] = {
    "no model": without("model"),
    "no optimizer": without("optimizer"),
    "no config": without("config"),
    "no progress": without("progress"),
    "no fingerprint": without("data_fingerprint"),
    "another model": lambda state: state | {"model": {"weight": state["model"]["0.weight"]}},
    "another optimizer": lambda state: state | {"optimizer": "sgd"},
}


@pytest.mark.fault("a checkpoint with a good checksum and other content")
@pytest.mark.parametrize("content", CONTENTS)
def test_a_checkpoint_with_other_content_is_one_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "run/checkpoints/step-00000016.pt"
    words = (*TINY, f"output_dir={tmp_path}", "name=run", "epochs=3")
    train_on(1, *words, "max_steps=16")
    write_file(path, CONTENTS[content](read_state(path)))
    done = launch(*words)
    [line] = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert (
        done.code,
        line.startswith(f"error: {path} holds something else than the state of this run ("),
    ) == (2, True)
    assert "Traceback" not in done.output


@pytest.mark.fault("files that a kill left while they were written")
def test_what_a_killed_save_has_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    (folder / ".step-00000003.pt.writing").write_bytes(b"half")
    (folder / ".best.pt.writing").write_bytes(b"half")
    train_on(1, *TINY, f"output_dir={tmp_path}", "name=run")
    assert checkpoints(tmp_path / "run") == ["best.pt", "step-00000008.pt", "step-00000016.pt"]


# --- the config, the lock, the launch -----------------------------------------------------------


@pytest.mark.fault("config.yaml removed, and another config")
def test_without_config_yaml_another_config_is_refused(tmp_path: Path) -> None:
    words = (*TINY, f"output_dir={tmp_path}", "name=run")
    train_on(1, *words)
    (tmp_path / "run/config.yaml").unlink()
    done = launch(*words, "optimizer.lr=0.3")
    assert done.code == 2
    assert "holds a run of another config (optimizer.lr: 0.05 → 0.3)" in done.output


def test_a_config_file_that_cannot_be_read_now_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000001.pt").touch()
    (tmp_path / "config.yaml").symlink_to("/proc/self/mem")  # reading it is an I/O error
    with pytest.raises(OSError, match="Input/output error"):
        check_config_file(tmp_path, {})


@pytest.mark.fault("a lock that is held")
def test_a_lock_that_another_process_has_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with (
        lock_file(lock, seconds=0, holder="mine"),
        pytest.raises(TransientError, match="another has it"),
        lock_file(lock, seconds=0.2, holder="another has it"),
    ):
        pass


@pytest.mark.fault("a file system without locks")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_one_error(number: int, tmp_path: Path, monkeypatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)  # no file system here does that
    without_locks = pytest.raises(TransientError, match="mount the file system with locks")
    with without_locks, lock_file(tmp_path / "lock", seconds=0, holder=""):
        pass


def hold_lock(lock: Path) -> None:
    with lock_file(lock, seconds=0, holder=""):
        lock.with_name("is_held").touch()
        time.sleep(3600)


@pytest.mark.fault("SIGKILL of a process that has a lock")
def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    process = forkserver().Process(target=hold_lock, args=(lock,))
    process.start()
    wait_for((tmp_path / "is_held").exists)
    with pytest.raises(TransientError), lock_file(lock, seconds=0, holder="it is alive"):
        pass
    process.kill()
    process.join()
    with lock_file(lock, seconds=0, holder="it has been killed"):
        pass


def test_a_folder_that_cannot_be_written_is_no_failure_of_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "missing/lock"
    with pytest.raises(FileNotFoundError), lock_file(lock, seconds=0, holder=""):
        pass


@pytest.mark.fault("SIGKILL of a rank with resume=never and --max-restarts")
def test_a_restart_resumes_although_resume_is_never(tmp_path: Path) -> None:
    words = [
        *TINY,
        f"output_dir={tmp_path}",
        "name=run",
        "checkpoint.every_steps=2",
        "resume=never",
    ]
    done = launch(
        *words, ranks=2, script=FAULTY, options=["--max-restarts=2"], FAULT="kill:1:5:once"
    )
    assert done.code == 0, done.output
    assert "step-00000004.pt (epoch" in done.output, "resumed"
    assert not list(tmp_path.glob("run.old*"))
    assert read_summary(tmp_path / "run")["steps"] == 16


@pytest.mark.fault("SIGTERM to a sweep in one process group")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_graceful_stop_ends_a_sweep_and_the_same_command_goes_on(
    ranks: int, tmp_path: Path
) -> None:
    words = ["--multirun", *TINY, "seed=0,1", f"output_dir={tmp_path}", "name=run", "epochs=60"]
    command = [sys.executable] if ranks == 1 else torchrun(2)
    with start_command([*command, "-m", "ddp_trainer", *words]) as sweep:
        wait_for(
            lambda: (
                list(tmp_path.glob("run/*seed=0*/checkpoints/step-*.pt"))
                or sweep.poll() is not None
            )
        )
        children = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split()
        os.kill(sweep.pid if ranks == 1 else int(children[0]), signal.SIGTERM)
        output, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 0, output
    assert "not finished" in output
    assert not list(tmp_path.glob("run/*seed=1*"))
    done = launch(*words, ranks=None if ranks == 1 else 2)
    assert done.code == 0, done.output
    run_dirs = [path for path in (tmp_path / "run").iterdir() if path.is_dir()]
    assert [read_summary(run_dir)["epochs"] for run_dir in run_dirs] == [60, 60]


@pytest.mark.fault("SIGTERM within a period of local_sgd")
def test_local_sgd_stops_within_its_period(tmp_path: Path) -> None:
    words = [
        *TINY,
        f"output_dir={tmp_path}",
        "name=run",
        "sync=local_sgd",
        "sync.every_steps=1000",
        "epochs=40",
    ]
    words += ["data.num_train=1200"]
    done = launch(*words, ranks=2, script=FAULTY, FAULT="terminate:1:5")
    assert done.code == 0, done.output
    assert newest_step(tmp_path / "run") < 50, "an epoch has 100 steps"
    assert "not finished" in done.output


# --- the data -----------------------------------------------------------------------------------


def write_images(folder: Path, *, count: int, seed: int) -> None:
    """Write random images of 12×12 pixels as Fashion-MNIST's four files."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for split, number in (("train", count), ("t10k", 20)):
        images = random.integers(256, size=(number, 12, 12)).astype(np.uint8)
        header = bytes([0, 0, 8, 3]) + np.array(images.shape, dtype=">i4").tobytes()
        (folder / f"{split}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = bytes(range(10)) * (number // 10)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(
            bytes([0, 0, 8, 1]) + len(labels).to_bytes(4) + labels
        )


OWN_DATA = (
    "model=lenet",
    "data=fashion_mnist",
    "data.root=data",
    "data.mean=[0.5]",
    "data.std=[0.5]",
    "data.augment.random_crop_padding=0",
    "precision=fp32",
    "global_batch_size=20",
    "epochs=2",
)


def train_with_own_data(folder: str) -> str:
    """Train with the data set in this rank's own folder; return the error."""
    os.chdir(f"{folder}/{os.environ['RANK']}")
    try:
        train(compose(*OWN_DATA, f"output_dir={folder}", "name=run"))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.fault("other images on one rank, as many or fewer")
@pytest.mark.parametrize("count", [100, 60])
def test_ranks_with_other_images_are_refused(count: int, tmp_path: Path) -> None:
    write_images(tmp_path / "0/data", count=100, seed=0)
    write_images(tmp_path / "1/data", count=count, seed=1)
    errors = on_ranks(2, train_with_own_data, str(tmp_path))
    assert errors[0] == errors[1]
    assert errors[0].startswith("rank 1 was started with other images than rank 0")
    assert not (tmp_path / "run").exists()


@pytest.mark.fault("other images at resume, as many or fewer")
@pytest.mark.parametrize("count", [100, 60])
def test_other_images_at_resume_are_refused(count: int, tmp_path: Path) -> None:
    words = (*OWN_DATA, f"output_dir={tmp_path}", "name=run")
    write_images(tmp_path / "data", count=100, seed=0)
    succeed(*words, "max_steps=5", cwd=tmp_path)
    state = newest_checkpoint(tmp_path / "run")
    write_images(tmp_path / "data", count=count, seed=1)
    done = launch(*words, cwd=tmp_path)
    assert done.code == 2, done.output
    assert "was trained on other images than data=fashion_mnist has here" in done.output
    assert newest_checkpoint(tmp_path / "run")["step"] == state["step"]
    write_images(tmp_path / "data", count=100, seed=0)
    succeed(*words, cwd=tmp_path)
    assert [record["step"] for record in records(tmp_path / "run", "eval/top1")] == [5, 10]
