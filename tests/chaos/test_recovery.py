"""A rank is lost, and the others go on: `recovery.min_ranks`."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import trials
from processes import PACE, PACING, ROOT, launch, on_ranks, plugins, start_command, wait_for
from runs import BATCHNORM, TINY, newest_checkpoint, read_summary, records
from torch.distributed import TCPStore

from ddp_trainer.checkpoint.file import State
from ddp_trainer.config.errors import USER_ERROR
from ddp_trainer.config.schema import Backend, Device
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.membership import Membership, Process, Round, start_time_of
from ddp_trainer.distributed.process_group import process_group, shutdown
from ddp_trainer.recovery import Held, restore_furthest
from ddp_trainer.training.run import RecoveryState, Stage

RANKS = 3
JOB = (*TINY, "data.num_train=960", "recovery.min_ranks=1")
SHARDS = (*JOB, "shards=6")
STEPS = 80
"""The number of steps of an epoch."""
LOG_EVERY = 20
EPOCHS = 4

pytestmark = pytest.mark.timeout(600)


class Job:
    """A job of three ranks on this machine, each with a torchrun of its own."""

    def __init__(self, folder: Path, *words: str, **variables: Any) -> None:
        self.run_dir = folder / "run"
        self.process = start_command(
            [str(ROOT / "launch/local.sh"), *words, f"output_dir={folder}", "name=run"],
            ISOLATED="1",
            NPROC=str(RANKS),
            **variables,
        )

    def ranks(self) -> dict[int, int]:
        """Return the ids of the processes that train, by slot."""
        found = {}
        for agent in children(self.process.pid):
            for worker in children(agent):
                with_slot = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
                names = dict(word.split(b"=", 1) for word in with_slot if b"=" in word)
                if b"RANK" in names:
                    found[int(names[b"RANK"])] = worker
        return found

    def wait_for_step(self, step: int = 1) -> None:
        wait_for(lambda: steps(self.run_dir) >= step or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()[0]

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=240)
        return self.process.returncode, output


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:  # it has ended
        return []


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return records(run_dir)[-1]["step"] if path.exists() and path.read_text() else 0


@contextmanager
def job(folder: Path, *words: str, **variables: Any) -> Iterator[Job]:
    running = Job(folder, *words, **variables)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            subprocess.run(["kill", "-KILL", f"-{running.process.pid}"], check=False)


def curves(run_dir: Path) -> list[dict[str, Any]]:
    """Return the values in metrics.jsonl that are not measurements, with their steps."""
    tags = ("step", "train/", "eval/", "samples/", "optim/")
    values = [
        {tag: value for tag, value in record.items() if tag.startswith(tags)}
        for record in records(run_dir)
    ]
    return [record for record in values if len(record) > 1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = launch(*SHARDS, f"epochs={EPOCHS}", f"output_dir={folder}", "name=run")
    assert done.code == 0, done.output
    return folder / "run"


def plan_of(seed: int, number: int) -> str:
    """Return a plan for the observer in killing.py: places in the first five epochs, and slots."""
    chance = random.Random(seed)
    places = ["gradient_sync", "gradient_sync", "evaluation", "save", "forward", "control_point"]
    words = []
    for kill in range(number):
        slot = 0 if kill in (0, 2) else chance.randrange(RANKS)  # rank 0 writes the files
        step = chance.randrange(STEPS * 5)
        delay = chance.uniform(0, 8)
        place = places[kill % len(places)]
        if place == "control_point":  # before the others log
            step += -step % LOG_EVERY
            delay = 0
        words.append(f"{slot}:{place}:{step}:{delay:.1f}")
    together = chance.randrange(STEPS * 5)
    return " ".join([*words, *(f"{slot}:backward:{together}:1" for slot in (1, 2))])


@pytest.mark.fault("SIGKILL of a rank, while the others go on", times=10)
@pytest.mark.parametrize("seed", range(trials(1, full=10)))
def test_killed_ranks_do_not_change_a_bit(seed: int, tmp_path: Path) -> None:
    check_same_bits((*SHARDS, "epochs=7"), plan_of(seed, 8), tmp_path)


@pytest.mark.fault("SIGKILL of a rank after it has changed BatchNorm's statistics", times=2)
def test_killed_ranks_do_not_change_statistics(tmp_path: Path) -> None:
    """Within a step, and while statistics are measured after a short epoch, here of 16 steps."""
    plan = "2:evaluation:32:0 1:gradient_sync:37:1"
    words = (*SHARDS, *BATCHNORM, "data.num_train=192", "epochs=3")
    check_same_bits(words, plan, tmp_path)


@pytest.mark.fault("SIGKILL of a rank after observers have seen an evaluation", times=2)
def test_an_evaluation_that_is_repeated_counts_once(tmp_path: Path) -> None:
    """Early stopping, whose second epoch without an improvement ends the training."""
    words = (
        *SHARDS,
        "epochs=6",
        "data.num_train=240",
        "observer.early_stopping.patience=2",
        "observer.early_stopping.min_delta=2",
    )
    plan = "1:evaluated:20:0 0:evaluated:40:0"
    summary = check_same_bits(words, plan, tmp_path, observers="early_stopping")
    assert summary["status"] == "stopped_early"
    assert summary["steps"] == 60


def check_same_bits(
    words: tuple[str, ...], plan: str, tmp_path: Path, *, observers: str = ""
) -> dict[str, Any]:
    """Check that a job ends as an undisturbed one if ranks are killed as `plan` says; return its
    summary. observers: names to add, separated by commas.
    """
    done = tmp_path / "done"
    done.mkdir()
    alone = f"observer=[{observers}]"
    launched = launch(alone, *words, f"output_dir={tmp_path}", "name=whole")
    assert launched.code == 0, launched.output
    kills = (
        f"observer=[{','.join(filter(None, [observers, 'kills']))}]",
        f"observer.kills.plan='{plan}'",
        f"observer.kills.folder={done}",
    )
    with job(tmp_path, *words, *kills, **plugins("killing", ROOT / "tests/chaos")) as running:
        code, output = running.end()
    assert code == 0, output
    kills_done = len(list(done.iterdir()))
    assert kills_done >= min(8, len(plan.split()))
    whole = tmp_path / "whole"
    summary = read_summary(running.run_dir)
    assert summary["weights_sha256"] == read_summary(whole)["weights_sha256"]
    assert curves(running.run_dir) == curves(whole)
    assert summary["rounds"] > kills_done / 2  # of three ranks, two may be lost at once
    assert "Traceback" not in output
    return summary


@pytest.mark.fault("SIGKILL of a rank without shards")
@pytest.mark.parametrize("model", [(), BATCHNORM], ids=["lenet", "batchnorm"])
def test_without_shards_the_samples_are_the_same(model: tuple[str, ...], tmp_path: Path) -> None:
    words = (*JOB, *model, "epochs=2", "log_every_steps=4")
    done = launch(*words, f"output_dir={tmp_path}", "name=whole", ranks=None)
    assert done.code == 0, done.output
    # in the first step after a log point, because the sums of a lost rank are lost
    plan = f"1:forward:20:0 0:backward:{STEPS + 28}:0"
    kills = (
        "observer=[kills]",
        f"observer.kills.plan={plan!r}",
        f"observer.kills.folder={tmp_path}",
    )
    with job(tmp_path, *words, *kills, **plugins("killing", Path(__file__).parent)) as running:
        code, output = running.end()
    assert code == 0, output
    assert len(list(tmp_path.glob("*:*"))) == 2
    whole = records(tmp_path / "whole", "samples/digest")
    ours = records(running.run_dir, "samples/digest")
    for tag in ("step", "samples/count", "samples/digest"):
        assert [record[tag] for record in ours] == [record[tag] for record in whole]
    models = [newest_checkpoint(path)["model"] for path in (tmp_path / "whole", running.run_dir)]
    if model:  # the weights differ, because each rank has its own statistics
        tracked = [name for name in models[0] if name.endswith("num_batches_tracked")]
        assert {int(models[1][name]) for name in tracked} == {2 * STEPS}
        return
    torch.testing.assert_close(models[1], models[0], rtol=1e-3, atol=1e-5)
    losses = [
        [record["train/loss"] for record in records(path, "train/loss")]
        for path in (tmp_path / "whole", running.run_dir)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.fault("SIGSTOP of a rank, while the others go on")
@pytest.mark.parametrize("slot", [0, 2])
def test_a_silent_rank_is_replaced(slot: int, undisturbed: Path, tmp_path: Path) -> None:
    with job(tmp_path, *SHARDS, f"epochs={EPOCHS}", "recovery.silent_seconds=2") as running:
        running.wait_for_step()
        stopped = running.ranks()[slot]
        os.kill(stopped, signal.SIGSTOP)
        code, output = running.end()
    assert code == 0, output
    assert f"rank {slot} on " in output
    assert "was lost" in output
    assert not Path(f"/proc/{stopped}").exists()
    hashes = [read_summary(path)["weights_sha256"] for path in (running.run_dir, undisturbed)]
    assert hashes[0] == hashes[1]


def test_too_few_ranks_save_and_end(undisturbed: Path, tmp_path: Path) -> None:
    words = (*SHARDS, f"epochs={EPOCHS}", "recovery.min_ranks=3", "recovery.join_seconds=5")
    with job(tmp_path, *words) as running:
        running.wait_for_step()
        agent = children(running.process.pid)[1]
        os.kill(agent, signal.SIGKILL)  # with its rank, and nobody starts it again
        code, output = running.end()
    assert code != 0
    expected = "of at least 3 ranks (recovery.min_ranks) are left, and no others came within 5 s"
    assert output.count(expected) == 1, output
    assert "the state is saved as " in output
    done = launch(*SHARDS, f"epochs={EPOCHS}", f"output_dir={tmp_path}", "name=run")
    assert done.code == 0, done.output
    hashes = [read_summary(path)["weights_sha256"] for path in (running.run_dir, undisturbed)]
    assert hashes[0] == hashes[1]


def test_a_group_that_no_rank_can_form_ends_the_job(tmp_path: Path) -> None:
    """gloo fails at each start: no rank was lost, and another round would not help."""
    with job(tmp_path, *JOB, "epochs=1", GLOO_DEVICE_TRANSPORT="none") as running:
        code, output = running.end()
    assert code == 1, output
    assert "the ranks could not connect to each other 10 times in a row (" in output


def test_an_exception_ends_the_job_with_one_cause(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "raising.py").write_text(RAISING)
    words = (*SHARDS, f"epochs={EPOCHS}", "observer=[raising]")
    with job(tmp_path, *words, **plugins("raising", folder)) as running:
        code, output = running.end()
    assert code == 1, output
    assert output.count("Root Cause") == 1, output
    assert "ObserverError: observer=raising failed in on_step (ValueError: not this" in output


RAISING = """
import json
import os

from ddp_trainer import Observer, ObserverConfig, register_observer
from ddp_trainer.config.errors import config_class


@config_class
class RaisingConfig(ObserverConfig):
    name: str = "raising"


class Raising(Observer):
    def __init__(self, config):
        pass

    def on_step(self, run):
        if run.step == 30 and os.environ["RANK"] == "1":
            raise ValueError("not this batch")


register_observer("raising", RaisingConfig, Raising)
"""


def test_another_program_that_writes_to_the_store_ends_the_job_and_nothing_else(
    tmp_path: Path,
) -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    with job(tmp_path, *SHARDS, "epochs=100") as running:
        running.wait_for_step()
        worker = running.ranks()[1]
        words = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
        [port] = [int(word[12:]) for word in words if word.startswith(b"MASTER_PORT=")]
        store = TCPStore("127.0.0.1", port, wait_for_workers=False)
        begun = start_time_of(bystander.pid)
        forged = [1, "nobody", socket.gethostname(), bystander.pid, begun, 1, False]
        for key in [key for key in store.list_keys() if key.startswith("recovery/member/")]:
            store.set(key, "garbage")
        store.set("recovery/member/1", json.dumps(forged))
        store.set("recovery/round", "garbage")
        os.kill(worker, signal.SIGKILL)
        code, output = running.end()
    assert code == 1, output
    assert "another program has written to the MASTER_PORT" in output
    assert "Traceback" not in output
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_stop_is_graceful(tmp_path: Path) -> None:
    with job(tmp_path, *SHARDS, "epochs=30") as running:
        running.wait_for_step(20)
        os.kill(running.process.pid, signal.SIGTERM)
        code, output = running.end()
    assert code == 0, output
    assert "not finished: the same command resumes it" in output


def test_a_rank_with_other_settings_does_not_join_and_disturbs_nobody(tmp_path: Path) -> None:
    """It takes the place of a rank that was killed, as a node with another checkout would."""
    is_slow = tmp_path / "slow"
    pace = (PACE, f"observer.pace.file={is_slow}")
    with job(tmp_path, *SHARDS, f"epochs={EPOCHS}", *pace, MAX_RESTARTS="0", **PACING) as running:
        running.wait_for_step()
        is_slow.touch()
        killed = running.ranks()[1]
        names = dict(
            word.split(b"=", 1)
            for word in Path(f"/proc/{killed}/environ").read_bytes().split(b"\0")
            if b"=" in word
        )
        variables = {name.decode(): value.decode() for name, value in names.items()}
        os.kill(killed, signal.SIGKILL)
        words = (*SHARDS, f"epochs={EPOCHS}", *pace, "seed=1", f"output_dir={tmp_path}", "name=run")
        other = subprocess.run(
            [sys.executable, "-m", "ddp_trainer", *words],
            env=variables | {"DDP_TRAINER_LOCAL_RANK": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        is_slow.unlink()
        _, output = running.end()
    assert other.returncode == USER_ERROR, other.stderr
    assert "other versions, settings or data than the ranks that train" in other.stderr
    assert read_summary(running.run_dir)["steps"] == EPOCHS * STEPS, output


def test_a_torchrun_of_several_ranks_is_refused(tmp_path: Path) -> None:
    done = launch(*JOB, f"output_dir={tmp_path}", ranks=2)
    assert done.code != 0
    assert "needs a torchrun process for each rank" in done.output


@pytest.mark.parametrize("nonce", ["former", "successor"])
def test_only_a_lost_member_is_killed_and_not_its_successor(nonce: str) -> None:
    """torchrun starts a lost rank again under the same slot, perhaps before the loss is noticed."""
    bystander = subprocess.Popen(["sleep", "600"], env=os.environ | {"RANK": "1"})
    try:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        limits = {"min_ranks": 1, "join_seconds": 1, "silent_seconds": 0}
        membership = Membership(store, slot=0, num_slots=2, **limits)
        membership.round = Round(1, [1], ["former"])
        host = socket.gethostname()
        entry = Process(1, nonce, host, bystander.pid, start_time_of(bystander.pid))
        membership._seen[1] = (entry, time.monotonic() - 1)
        membership._watch()
        assert membership.is_broken
        if nonce == "former":
            assert bystander.wait(timeout=10) == -signal.SIGKILL
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                bystander.wait(timeout=0.5)
    finally:
        bystander.kill()
        bystander.wait()


# --- the state that the next group takes over -----------------------------------------------------


def _restore(positions: list[tuple[int, Stage] | None]) -> list[Any]:
    """Restore what ranks hold: at `positions`, by rank; return what this rank then has."""
    options: dict[str, Any] = {"device": Device.cpu, "backend": Backend.gloo, "num_threads": 1}
    with process_group(read_environment(), timeout_seconds=60, **options) as world:
        held = None
        if position := positions[world.rank]:
            held = Held(
                state={"step": position[0], "epoch": 0, "model": {"w": torch.tensor([world.rank])}},
                stage=position[1],
                is_best=world.rank == 1,
                records=[["scalars", {"rank": world.rank}]],
                records_after=world.rank,
            )
        taken: list[State] = []
        store = SimpleNamespace(adopt=taken.append, restore=lambda state: "from a checkpoint")
        run: Any = SimpleNamespace(world=world, checkpoints=store, stage=Stage.step)
        run.progress = SimpleNamespace(is_best=False)
        run.recovery = RecoveryState(store.restore)
        state: Any = SimpleNamespace(load_state_dict=taken.append)
        is_resumed = restore_furthest(run, state, held)
        sources = [int(state["model"]["w"]) for state in taken]
        recovery = run.recovery
        records = [recovery.records_after, recovery.records]
        return [is_resumed, sources, run.stage.name, run.progress.is_best, records]


@pytest.mark.parametrize(
    ("positions", "furthest"),
    [
        ([(3, Stage.step), (5, Stage.save), (4, Stage.step)], 1),
        ([(5, Stage.evaluation), (5, Stage.save), (5, Stage.control_point)], 1),  # same step
        ([None, (9, Stage.control_point), (9, Stage.step)], 2),  # rank 0 was started again
        ([(2, Stage.save), None, None], 0),
    ],
)
def test_all_take_over_the_state_of_the_furthest_rank(
    positions: list[tuple[int, Stage] | None], furthest: int
) -> None:
    known = positions[furthest]
    assert known is not None
    records = [furthest, [["scalars", {"rank": furthest}]]]
    expected = [True, [furthest] * 2, known[1].name, furthest == 1, records]
    assert on_ranks(RANKS, _restore, positions) == [expected] * RANKS


def test_ranks_that_hold_nothing_take_the_newest_checkpoint() -> None:
    expected = ["from a checkpoint", [], "step", False, [0, []]]
    assert on_ranks(RANKS, _restore, [None] * RANKS) == [expected] * RANKS


# --- rounds ---------------------------------------------------------------------------------------

NUM_ROUNDS = 200


def _rounds() -> list[list[int]]:
    """Form one process group after another; return threads, sockets and pages after some."""
    environment = read_environment()
    store = next(dist.rendezvous("env://"))[0]
    members = Membership(
        store, slot=environment.rank, num_slots=2, min_ranks=2, join_seconds=60, silent_seconds=60
    )
    sizes = []
    with members:
        for number in range(NUM_ROUNDS):
            options: dict[str, Any] = {"device": Device.cpu, "backend": Backend.gloo}
            options |= {"num_threads": 1, "timeout_seconds": 60, "membership": members}
            with suppress(InterruptedError), process_group(environment, **options) as world:
                assert world.all_reduce(torch.ones(1)).item() == 2
                raise InterruptedError  # else the context would leave the group by itself
            members.leave_round()
            shutdown()
            if number % 50 == 49:
                process = Path("/proc/self")
                pages = int((process / "statm").read_text().split()[1])
                sizes.append(
                    [
                        len(list((process / "task").iterdir())),
                        len(list((process / "fd").iterdir())),
                        pages,
                    ]
                )
    return sizes


def test_many_rounds_leave_nothing_behind() -> None:
    for sizes in on_ranks(2, _rounds):
        first, *others = sizes
        for threads, files, pages in others:
            assert threads <= first[0]
            assert files <= first[1]
            assert pages - first[2] < 1000  # 4 MB
