"""Guarantee 6: the failure of one rank ends all ranks soon, and its root cause is reported once."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import Finished, clean_environment, launch, succeed, torchrun, wait_for
from runs import BATCHNORM, TINY, assert_bitwise, newest_checkpoint, train_on, trained_state

from ddp_trainer.checkpoint.file import DamagedCheckpointError, read_state, write_file

ASYNC = "sync=async_parameter_server"
FAULTY = str(Path(__file__).with_name("faulty.py"))


def launch_faulty(fault: str, tmp_path: Path, *overrides: str, ranks: int = 2) -> Finished:
    words = (*TINY, f"output_dir={tmp_path}", "name=run", "checkpoint.every_steps=2", *overrides)
    return launch(*words, ranks=ranks, script=FAULTY, FAULT=fault)


def last_block(output: str) -> str:
    """Return torchrun's block that ends the output; its part on the root cause is short.

    Before that part torchrun lists the ranks that it has found dead at the same time, if any.
    """
    lines = output.rstrip().splitlines()
    assert set(lines[-1]) == {"="}, output
    first = max(i for i, line in enumerate(lines[:-1]) if set(line) == {"="})
    cause = next(i for i, line in enumerate(lines) if line.startswith("Root Cause"))
    assert first < cause
    assert len(lines) - cause <= 14, output
    return "\n".join(lines[first:])


@pytest.mark.fault("an exception in one rank")
def test_an_exception_ends_the_job_and_is_reported_once(tmp_path: Path) -> None:
    done = launch_faulty("raise:1:5", tmp_path, ranks=3)
    assert time.time() - (tmp_path / "run/failure.log").stat().st_mtime < 15
    assert done.code == 1
    assert done.output.count("Error: boom in the worker") == 1
    text = last_block(done.output)
    assert "rank 1 on" in text
    assert "between steps after step 5" in text  # the fault comes before the forward pass
    assert f"last good checkpoint: {tmp_path / 'run/checkpoints/step-0000000'}" in text
    assert re.search(
        r"to continue: torchrun --nproc_per_node=3 --master-port=\d+ \S+/faulty\.py model=lenet",
        text,
    )
    assert "boom in the worker" in (tmp_path / "run/failure.log").read_text()


@pytest.mark.fault("SIGKILL of a rank")
@pytest.mark.parametrize("fault", ["kill", "lost"])
def test_a_killed_rank_ends_the_job_and_the_rest_is_resumed(fault: str, tmp_path: Path) -> None:
    done = launch_faulty(f"{fault}:1:5", tmp_path)
    assert done.code == 1
    text = last_block(done.output)
    assert "(SIGKILL)" in text
    assert "rank 1 on" in text
    assert "was lost (killed, perhaps by the kernel because memory was full, or aborted by" in text
    assert f"last good checkpoint: the newest in {tmp_path / 'run/checkpoints'}" in text
    assert re.search(
        r"to continue: torchrun --nproc_per_node=2 --master-port=\d+ \S+/faulty\.py model=lenet",
        text,
    )
    train_on(2, *TINY, f"output_dir={tmp_path}", "name=run", "checkpoint.every_steps=2")


@pytest.mark.fault("SIGKILL of a rank")
@pytest.mark.parametrize("rank", [0, 1], ids=["server", "worker"])
def test_a_killed_rank_of_an_asynchronous_job_is_named(rank: int, tmp_path: Path) -> None:
    """It is killed at the start of an epoch, because in between a rank may skip a step."""
    done = launch_faulty(f"kill:{rank}:8", tmp_path, ASYNC, ranks=3)
    assert done.code == 1
    assert f"rank {rank} on" in (text := last_block(done.output))
    assert "was lost (killed" in text
    train_on(3, *TINY, f"output_dir={tmp_path}", "name=run", "checkpoint.every_steps=2", ASYNC)


@pytest.mark.fault("SIGKILL of a rank")
def test_a_killed_stage_is_named_and_the_pipeline_is_resumed(tmp_path: Path) -> None:
    words = ("sync=pipeline", "sync.num_stages=3")
    done = launch_faulty("kill:1:5", tmp_path, *words, ranks=3)
    assert done.code == 1
    assert "rank 1 on" in (text := last_block(done.output))
    assert "was lost (killed" in text
    train_on(3, *TINY, f"output_dir={tmp_path}", "name=run", "checkpoint.every_steps=2", *words)
    train_on(3, *TINY, f"output_dir={tmp_path}", "name=whole", *words)
    assert_bitwise(trained_state(tmp_path / "run"), trained_state(tmp_path / "whole"))


@pytest.mark.fault("SIGSTOP of a rank")
@pytest.mark.parametrize(
    ("fault", "seconds", "words"),
    [("stop", 10, ()), ("frozen", 2, ()), ("stop", 10, ("sync=pipeline",))],
    ids=["stop", "frozen", "stop-pipeline"],
)
def test_a_rank_that_stops_answering_is_named(
    fault: str, seconds: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    done = launch_faulty(f"{fault}:1:5", tmp_path, f"timeout_seconds={seconds}", *words)
    assert done.code == 1, done.output
    assert "rank 1 on" in (text := last_block(done.output))
    assert "has not answered for" in text


@pytest.mark.fault("NaN in one rank")
@pytest.mark.parametrize(
    ("words", "before", "saved"),
    [((), 5, 4), ((ASYNC,), 8, 8), (("sync=pipeline",), 5, 4)],
    ids=["ddp", "async", "pipeline"],
)
def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint(
    words: tuple[str, ...], before: int, saved: int, tmp_path: Path
) -> None:
    done = launch_faulty(f"nan:1:{before}", tmp_path, *words)
    assert done.code == 1
    assert f"step {before + 1} is not finite (lr " in done.output
    state = newest_checkpoint(tmp_path / "run")
    assert state["step"] == saved
    assert all(value.isfinite().all() for value in state["model"].values())


# before the first update momentum is uninitialized memory unless it is set
@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize(  # with BatchNorm, whose statistics are affected too
    "words",
    [(), BATCHNORM, (*BATCHNORM, "precision=fp16")],
    ids=["lenet", "batchnorm", "batchnorm-fp16"],
)
def test_updates_that_are_not_finite_can_be_skipped(
    step: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    done = launch_faulty(
        f"nan:1:{step}", tmp_path, "on_nonfinite=skip", "deterministic=true", *words
    )
    assert done.code == 0, done.output
    assert all(
        value.isfinite().all() for value in newest_checkpoint(tmp_path / "run")["model"].values()
    )


@pytest.mark.fault("a bit flipped in one rank's weights")
def test_a_flipped_bit_in_one_replica_is_found_at_the_next_save(tmp_path: Path) -> None:
    done = launch_faulty("flip:2:3", tmp_path, ranks=3)
    assert done.code == 1
    assert "the parameters of rank 2 differ from those of the other ranks after step" in done.output
    assert re.search(
        r"rank \d on \S+ and all other ranks stopped, in \w+ after step \d", done.output
    ), done.output
    assert newest_checkpoint(tmp_path / "run")["step"] == 2


@pytest.mark.fault("SIGTERM at the start, in training, evaluation or a save")
@pytest.mark.parametrize("where", ["start", "5", "evaluation", "save"])
def test_a_term_signal_stops_gracefully_and_the_same_command_resumes(
    where: str, tmp_path: Path
) -> None:
    done = launch_faulty(f"terminate:{0 if where == 'save' else 1}:{where}", tmp_path, "epochs=200")
    assert done.code == 0, done.output
    assert "stopped at step" in done.output
    assert (tmp_path / "run/stopped").exists()
    step = newest_checkpoint(tmp_path / "run")["step"]
    assert 0 < step < 1600
    overrides = (*TINY, "epochs=200", "checkpoint.every_steps=2", f"max_steps={step + 3}")
    train_on(2, *overrides, f"output_dir={tmp_path}", "name=run", deadline=120)
    assert not (tmp_path / "run/stopped").exists()
    train_on(2, *overrides, f"output_dir={tmp_path}", "name=alone", deadline=120)
    states = [newest_checkpoint(tmp_path / name)["model"] for name in ("run", "alone")]
    assert_bitwise(*states)


def test_a_stop_file_stops_gracefully(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    words = (*TINY, f"output_dir={tmp_path}", "name=run", "epochs=200")
    done = succeed(*words, ranks=2, DDP_TRAINER_STOP_FILE=str(tmp_path / "stop"))
    assert "not finished" in done.output
    assert (tmp_path / "run/stopped").exists()


@pytest.mark.fault("SIGKILL of torchrun")
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    command = [*torchrun(2), "-m", "ddp_trainer", *TINY, "epochs=100000", f"output_dir={tmp_path}"]
    with open(tmp_path / "log", "w") as log:
        agent = subprocess.Popen(
            [*command, "name=run"],
            env=clean_environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists())
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    assert len(children) == 2
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    wait_for(lambda: not any(is_alive(int(pid)) for pid in children))


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_two_interrupts_at_once_stop_now(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ddp_trainer",
        *TINY,
        "epochs=100000",
        f"output_dir={tmp_path}",
        "name=run",
    ]
    process = subprocess.Popen(
        command, env=clean_environment(), stdout=subprocess.DEVNULL, start_new_session=True
    )
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists())
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=10) in (-signal.SIGINT, 0)


def test_nothing_in_a_checkpoint_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {tmp_path}/x",)

    write_file(tmp_path / "evil.pt", {"model": Evil()})
    with pytest.raises(DamagedCheckpointError, match="does not load"):
        read_state(tmp_path / "evil.pt")
    assert not (tmp_path / "x").exists()
