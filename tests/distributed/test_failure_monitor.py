"""The failure monitor: one root cause is reported, and a healthy job is left alone."""

import ctypes
import json
import os
import re
import signal
import sys
import time
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import on_ranks, start_ranks
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.config.schema import Backend, Device
from ddp_trainer.data.readers import SampleReader
from ddp_trainer.distributed.environment import Environment, read_environment
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.distributed.process_group import process_group
from ddp_trainer.distributed.world import record_progress
from ddp_trainer.observers.failures.monitor import FailureMonitor
from ddp_trainer.observers.failures.report import command_to_continue
from ddp_trainer.training.phase import Phase


def run_monitored(body, folder: str, timeout_seconds: float) -> str:
    """Call ``body(rank, monitor)`` in a monitor on every rank, with an error file, and return what
    that file holds.
    """
    os.environ["TORCHELASTIC_ERROR_FILE"] = error_file = f"{folder}/error-{os.environ['RANK']}.json"
    environment = read_environment()
    with (
        process_group(
            environment, device=Device.cpu, backend=Backend.gloo, num_threads=1, timeout_seconds=60
        ) as world,
        FailureMonitor(
            world,
            environment,
            GracefulStop(),
            run_dir=Path(folder),
            timeout_seconds=timeout_seconds,
        ) as monitor,
    ):
        monitor.on_phase(None, Phase.data)
        monitor.on_step(SimpleNamespace(step=3))
        body(world.rank, monitor)
    return read_report(error_file)


def read_report(path: str | Path) -> str:
    return json.loads(Path(path).read_text())["message"]["message"] if Path(path).exists() else ""


def hold_the_gil(rank: int, monitor: FailureMonitor) -> None:
    time.sleep(1.5)  # all ranks have sent heartbeats
    if rank == 1:
        # PyDLL does not release the GIL, so that no heartbeat is sent
        ctypes.PyDLL(None).usleep(2_500_000)
    else:
        time.sleep(3.5)


def progress(*, seconds: float) -> None:
    """Make progress for so long: a rank that does nothing would be reported itself."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.2)
        record_progress()


def finish_early(rank: int, monitor: FailureMonitor) -> None:
    progress(seconds=2 if rank == 1 else 9)


def end_slowly(rank: int, monitor: FailureMonitor) -> None:
    monitor.on_phase(None, Phase.end)
    time.sleep(8)  # as loggers may that upload their files; others are reported after 5 s


class SlowImages(Dataset[tuple[Tensor, int]]):
    """Images that are read from a slow disk."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.3)
        return torch.zeros(1, 4, 4, dtype=torch.uint8), 0


def read_slowly(rank: int, monitor: FailureMonitor) -> None:
    reader = SampleReader(SlowImages(), image_shape=(1, 4, 4), num_classes=1, num_workers=1)
    next(reader.read([torch.arange(30)]))  # 9 s, in which the main thread only waits


@pytest.mark.fault("heartbeats late at a timeout of 2 s")
@pytest.mark.parametrize("body", [hold_the_gil, finish_early, end_slowly, read_slowly])
def test_a_healthy_job_is_left_alone_at_a_short_timeout(body, tmp_path: Path) -> None:
    assert on_ranks(2, run_monitored, body, str(tmp_path), 2.0) == ["", ""]
    assert not (tmp_path / "failure.log").exists()


def end_silently(rank: int, monitor: FailureMonitor) -> None:
    progress(seconds=1.5 if rank == 1 else 60)
    os._exit(0)  # as a process does that a container's runtime kills and removes


def stop_silently(rank: int, monitor: FailureMonitor) -> None:
    progress(seconds=1.5 if rank == 1 else 60)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def run_to_failure(
    body, folder: Path, *, ranks: int = 2, timeout_seconds: float = 2.0
) -> tuple[list[int | None], list[str]]:
    """Return the exit codes and the error files of ranks that no launcher ends, by rank."""
    processes = start_ranks(ranks, run_monitored, body, str(folder), timeout_seconds)
    for process in processes:
        process.join(timeout=40)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes, [read_report(folder / f"error-{rank}.json") for rank in range(ranks)]


@pytest.mark.fault("a rank gone or stopped without a word")
@pytest.mark.parametrize("body", [end_silently, stop_silently])
def test_a_rank_without_heartbeats_is_reported_and_the_job_ends(body, tmp_path: Path) -> None:
    codes, (report, _) = run_to_failure(body, tmp_path)
    # rank 0's SIGCONT wakes the stopped rank, which then ends
    assert codes == [
        1,
        0 if body is end_silently else 1,
    ]
    assert re.fullmatch(r"rank 1 on \S+ has not answered for \d+ s, in data after step 3", report)


def raise_on_both(rank: int, monitor: FailureMonitor) -> None:
    def emit() -> None:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"] + ".emitted", "a") as file:
            file.write("once")

    monitor.emit_failure = emit
    time.sleep(1.5 if rank == 1 else 2.0)
    raise RuntimeError("boom" if rank == 1 else "Connection closed by peer")


def test_only_the_first_failure_is_reported(tmp_path: Path) -> None:
    codes, (other, report) = run_to_failure(raise_on_both, tmp_path)
    assert codes == [1, 1]
    assert other == ""
    assert re.fullmatch(r"rank 1 on \S+ failed first, in data after step 3", report)
    assert "RuntimeError: boom" in (tmp_path / "failure.log").read_text()
    for rank in range(2):
        assert (tmp_path / f"error-{rank}.json.emitted").read_text() == "once"


def raise_from_a_cause(rank: int, monitor: FailureMonitor) -> None:
    def observe() -> None:
        raise KeyError("values")

    try:
        observe()
    except KeyError as error:
        raise RuntimeError("observer=mine failed in on_step") from error


def test_a_report_has_the_place_of_the_cause_and_the_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for step in (99_999_999, 100_000_000):  # the second one is the smaller text
        (tmp_path / f"checkpoints/step-{step:08d}.pt").touch()
    code, (report,) = run_to_failure(raise_from_a_cause, tmp_path, ranks=1)
    assert code == [1]
    assert report.startswith("rank 0 on ")
    text = json.loads((tmp_path / "error-0.json").read_text())["message"]["extraInfo"]
    assert re.search(
        r"\nRuntimeError: observer=mine failed in on_step\n"
        r"at \S+test_failure_monitor\.py:\d+ in observe: raise \S+Error\(.*\)\n",
        text["py_callstack"],
    )
    newest = tmp_path / "checkpoints/step-100000000.pt"
    assert f"last good checkpoint: {newest}\n" in text["py_callstack"]


def lose_the_last_rank(rank: int, monitor: FailureMonitor) -> None:
    progress(seconds=1.5)
    if rank == 2:
        os._exit(0)
    raise RuntimeError("Connection closed by peer")


def test_two_ranks_that_see_the_same_failure_report_it_once(tmp_path: Path) -> None:
    codes, reports = run_to_failure(lose_the_last_rank, tmp_path, ranks=3, timeout_seconds=30.0)
    assert codes == [1, 1, 0]
    assert sorted(map(bool, reports[:2])) == [False, True]
    assert re.fullmatch(
        r"rank 2 on \S+ was lost .*, last seen in data after step 3", "".join(reports[:2])
    )


def show_stacks(rank: int, monitor: FailureMonitor) -> None:
    with redirect_stderr(StringIO()) as shown:
        os.kill(os.getpid(), signal.SIGQUIT)
        progress(seconds=4)
    assert re.match(
        rf"rank {rank}: data after step 3, at .*\n\nrank {rank} on .*:\n  /", shown.getvalue()
    )


def test_sigquit_prints_the_places_and_all_stacks(tmp_path: Path) -> None:
    assert on_ranks(1, run_monitored, show_stacks, str(tmp_path), 30.0) == [""]


TORCHRUN = "torchrun --nproc_per_node=2 --master-port=29500 -m ddp_trainer"


def start_as(monkeypatch: pytest.MonkeyPatch, module: str | None, words: list[str]) -> None:
    """Let this process look as if ``python -m module``, or a script, had been started."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(sys, "argv", ["lib/train.py", *words])
    monkeypatch.setattr(main, "__file__", "lib/train.py", raising=False)
    monkeypatch.setattr(main, "__spec__", find_spec(module) if module else None)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (None, "python lib/train.py 'a b'"),
        ("ddp_trainer.__main__", "python -m ddp_trainer 'a b'"),
        ("ddp_trainer.commands.report", "python -m ddp_trainer.commands.report 'a b'"),
    ],
)
def test_the_own_command_starts_the_same_program(
    module: str | None, expected: str, monkeypatch
) -> None:
    start_as(monkeypatch, module, ["a b"])
    assert command_to_continue(Environment()) == expected


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        (None, ["epochs=3", "resume=never", "name=a b"], f"{TORCHRUN} epochs=3 'name=a b'"),
        (None, ["++resume=never"], TORCHRUN),
        (
            "NPROC=2 'launch/local.sh' 'resume=never' 'seed=1'",
            [],
            "NPROC=2 'launch/local.sh' 'seed=1'",
        ),
        ("sbatch --nodes=2 slurm.sbatch resume=never", [], "sbatch --nodes=2 slurm.sbatch"),
        (None, ["name=resume=never"], f"{TORCHRUN} name=resume=never"),
    ],
)
def test_the_command_to_continue_resumes(
    command: str | None, words: list[str], expected: str, monkeypatch
) -> None:
    start_as(monkeypatch, "ddp_trainer.__main__", words)
    environment = Environment(
        world_size=2, local_world_size=2, under_torchrun=True, command=command
    )
    assert command_to_continue(environment) == expected
