"""Slow down one rank of a run by 20 %, again and again, and see whether it is named: which, where
and how soon.

    python benchmarks/stragglers.py                   # 24 trials, on 2, 3 and 4 ranks
    python benchmarks/stragglers.py --trials 0 --quiet-steps 1000

A rank is stopped by signals from outside for a sixth of the time, shares its core with another
process, or waits in its forward pass, its backward pass or its loader. Needs a machine that does
nothing else.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
SIZE = 64
KINDS = {
    "stopped": "backward",
    "core shared": "backward",
    "forward": "forward",
    "backward": "backward",
    "data": "data",
}
"""The kinds of slowdown, with the phase that is right: of those from outside the longest."""
FIRST_STEPS = 300
SLOW_STEPS = 70
LAST_STEPS = 60
LOG_STEPS = 10


class Trial(NamedTuple):
    """The outcome of one slowdown."""

    ranks: int
    kind: str
    rank: int
    steps: int | None
    """From the start of the slowdown to the log point at which the rank was named; None: not within
    70 steps.
    """
    named: str
    slowdown: float
    """As it was reported."""

    @property
    def is_right(self) -> bool:
        """Whether the right rank and phase were named within 50 steps."""
        return (
            self.steps is not None
            and self.steps <= 50
            and self.named == f"rank {self.rank} in {KINDS[self.kind]}"
        )


class Job:
    """A training job whose ranks can be slowed down."""

    def __init__(self, ranks: int, folder: Path, keys: list[str]) -> None:
        self.ranks = ranks
        self.run_dir = folder / "run"
        self.control = folder / "slowdown"
        self.known: list[dict[str, Any]] = []
        self.num_read = 0
        self.control.write_text(f"{'none':<{SIZE}}{0:<{SIZE}}")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        words = [
            f"--nproc_per_node={ranks}",
            f"--master-port={port}",
            "-m",
            "ddp_trainer",
            f"output_dir={folder}",
            "name=run",
            "model=lenet",
            "data=fashion_mnist",
            "device=cpu",
            "epochs=1000000",
            "logger=jsonl",
            f"log_every_steps={LOG_STEPS}",
            "eval_batch_size=1000",
            *keys,
        ]
        paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "PYTHONPATH": paths,
            "DDP_TRAINER_PLUGINS": "slowdowns",
            "OMP_NUM_THREADS": "1",
            "SLOWDOWN": str(self.control),
        }
        self.output = (folder / "output").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            env=environment,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    @property
    def step(self) -> int:
        """The number of steps that rank 0 has taken."""
        return int(self.control.read_text()[SIZE:])

    def set(self, text: str) -> None:
        """Begin or end a slowdown."""
        with self.control.open("r+") as file:
            file.write(f"{text:<{SIZE}}")

    def records(self) -> list[dict[str, Any]]:
        """Return the records of training so far; reads only what is new, to leave the cores to the
        ranks.
        """
        path = self.run_dir / "metrics.jsonl"
        if path.exists():
            with path.open() as file:
                file.seek(self.num_read)
                new = file.read().rpartition("\n")[0]
            self.num_read += len(new) + bool(new)
            self.known += [
                record
                for line in new.splitlines()
                if "rank/slowest" in (record := json.loads(line))
            ]
        return self.known

    def wait(self, step: int) -> None:
        """Wait until the records of `step` are there."""
        while not (records := self.records()) or records[-1]["step"] < step:
            assert self.process.poll() is None, self.run_dir
            time.sleep(0.1)

    def pid(self, rank: int) -> int:
        """Return the process of a rank."""
        processes = json.loads((self.run_dir / "processes.json").read_text())
        return next(process["pid"] for process in processes if process["rank"] == rank)

    def end(self) -> None:
        """Stop the job gracefully."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.output.close()


@contextmanager
def slowdown(job: Job, kind: str, rank: int) -> Iterator[None]:
    """Slow a rank down by 20 % inside the block."""
    helper = None
    if kind in ("stopped", "core shared"):
        # With more ranks than cores a rank that was stopped catches up, because it then has a core
        # for longer.
        share = 0.2 if job.ranks <= len(os.sched_getaffinity(0)) else 0.4
        helper = subprocess.Popen(
            [sys.executable, __file__, "--slow", kind, str(job.pid(rank)), str(share)]
        )
    else:
        own = statistics.median(record["rank/own_ms_median"] for record in job.records()[-10:])
        job.set(f"{kind} {rank} {0.2 * own / 1e3}")
    try:
        yield
    finally:
        job.set("none")
        if helper is not None:
            helper.send_signal(signal.SIGTERM)
            helper.wait()


def slow_process(kind: str, pid: int, share: float) -> None:
    """Slow a process down until this one is ended. share: how long it is stopped, by how long it is
    not.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if kind == "core shared":
        (core,) = os.sched_getaffinity(pid)
        os.sched_setaffinity(0, {core})
        # by time of the processor: the kernel's shares depend on how often the rank waits
        while True:
            end = time.process_time() + 0.05 * share
            while time.process_time() < end:
                pass
            time.sleep(0.05)
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05 * share)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)
    finally:
        os.kill(pid, signal.SIGCONT)


def try_slowdown(job: Job, kind: str, rank: int) -> Trial:
    """Return what was found about one slowdown, and wait until it is over."""
    with slowdown(job, kind, rank):
        begin = job.step
        found = None
        while job.step < begin + SLOW_STEPS:
            time.sleep(0.1)
            named = [
                record
                for record in job.records()[-10:]
                if record["step"] > begin and "straggler/rank" in record
            ]
            found = found or (named[0] if named else None)
    slow = {"begin": begin, "end": job.step, "kind": kind, "rank": rank}
    with (job.run_dir / "slow.jsonl").open("a") as file:
        file.write(json.dumps(slow) + "\n")
    job.wait(job.step + LAST_STEPS)
    while "straggler/rank" in job.records()[-1]:
        job.wait(job.step + LOG_STEPS)
    if found is None:
        return Trial(job.ranks, kind, rank, None, "nobody", 0.0)
    name = f"rank {found['straggler/rank']} in {found['straggler/phase']}"
    return Trial(
        job.ranks, kind, rank, found["step"] - begin, name, round(found["straggler/slowdown"], 2)
    )


def run_trials(
    ranks: int, count: int, quiet_steps: int, keys: list[str]
) -> tuple[list[Trial], list[str]]:
    """Return the trials on so many ranks, and the messages in the quiet steps before them."""
    chance = random.Random(time.time_ns())
    with tempfile.TemporaryDirectory() as name:
        job = Job(ranks, Path(name), keys)
        try:
            job.wait(max(FIRST_STEPS, quiet_steps))
            lines = (Path(name) / "output").read_text().splitlines()
            # not "no longer slower"
            alarms = [line for line in lines if "slower than the median" in line]
            kinds = [kind for kind in KINDS if kind != "core shared" or ranks == 2]
            if "core shared" in kinds:
                pin(job)
            trials = []
            for number in range(count):
                trials.append(
                    try_slowdown(job, kinds[number % len(kinds)], chance.randrange(ranks))
                )
                print(*trials[-1], "✓" if trials[-1].is_right else "✗", sep=" · ", flush=True)
            return trials, alarms
        finally:
            job.end()
            if keep := os.environ.get("KEEP"):
                shutil.copytree(job.run_dir, f"{keep}/{ranks}", dirs_exist_ok=True)
                shutil.copy(Path(name) / "blocks.jsonl", f"{keep}/{ranks}")


def pin(job: Job) -> None:
    """Give each rank a core of its own."""
    for rank, core in zip(range(job.ranks), sorted(os.sched_getaffinity(0)), strict=False):
        for thread in Path(f"/proc/{job.pid(rank)}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def main() -> None:
    """Print a table of the trials."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--trials", type=int, default=8, help="for each number of ranks [8]")
    parser.add_argument(
        "--quiet-steps", type=int, default=FIRST_STEPS, help="before the trials [300]"
    )
    parser.add_argument("--batch", type=int, default=1024, help="images of a rank in a step [1024]")
    parser.add_argument("--slow", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with the job
    if options.slow:
        slow_process(options.slow[0], int(options.slow[1]), float(options.slow[2]))
    trials: list[Trial] = []
    for ranks in options.ranks:
        done, alarms = run_trials(
            ranks,
            options.trials,
            options.quiet_steps,
            [f"global_batch_size={ranks * options.batch}"],
        )
        trials += done
        quiet = max(FIRST_STEPS, options.quiet_steps)
        print(
            f"{ranks} ranks: {len(alarms)} false alarms in {quiet} quiet steps", *alarms, flush=True
        )
    steps = [trial.steps for trial in trials if trial.steps is not None]
    print(
        f"{sum(trial.is_right for trial in trials)} of {len(trials)} named with the right phase"
        " within 50 steps",
        f"(median {statistics.median(steps)})" if steps else "",
    )


if __name__ == "__main__":
    main()
