"""A program that can connect to the ports of a job, and writes pickles to every store that it finds
there.
"""

import base64
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from processes import PACE, PACING, clean_environment, processes_with, torchrun
from runs import TINY
from torch.distributed import DistError, TCPStore

ROOT = Path(__file__).parents[2]
WAYS = {
    "python": [sys.executable, "-m", "ddp_trainer"],
    "torchrun with a port": [*torchrun(2), "-m", "ddp_trainer"],
    "local.sh": [str(ROOT / "launch/local.sh")],
    "multinode.sh": [str(ROOT / "launch/multinode.sh")],
    "a sweep": [
        sys.executable,
        "-m",
        "ddp_trainer",
        "--multirun",
        "hydra/launcher=torchrun",
        "seed=1",
    ],
}
"""The documented ways to start a job that is not elastic. (slurm.sbatch runs torchrun as
multinode.sh does.)
"""
SECONDS = 10.0
"""How long the attack lasts: torchrun's elastic rendezvous reads its state every 5 seconds."""
START_SECONDS = 90.0
"""How long a job may take until it listens."""


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mknod, (str(self.path),))


def listening_ports(tmp_path: Path) -> Iterator[int]:
    """Yield the TCP ports at which a job listens."""
    inodes = set()
    for pid in processes_with(f"ATTACKED={tmp_path}"):
        with suppress(OSError):
            inodes |= {os.readlink(link)[8:-1] for link in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                yield int(words[1].rpartition(":")[2], 16)


def call_with_timeout(function: Callable[[], int], timeout: float) -> int:
    """Return the result of ``function()`` from a daemon thread; TimeoutError if it is late."""
    future: Future[int] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # `future.result` raises it
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future.result(timeout)


def overwrite(port: int, pickled: bytes, *, everything: bool) -> int:
    """Write `pickled` to the keys of elastic rendezvous in a store, as torchrun reads them, else to
    all keys; return how many there are.
    """
    store = TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=1))
    keys = store.list_keys()
    states = [key for key in keys if re.fullmatch(r"torch\.rendezvous\.[^/]*", key)]
    for key in states:
        store.set(key, base64.b64encode(pickled).decode())
    if states or not everything:
        return len(states)
    for key in keys:
        store.set(key, pickled.decode("latin-1"))
    return len(keys)


def overwritten(port: int, *, pickled: bytes, everything: bool) -> int:
    """Return the result of `overwrite`; 0 if there is no store, or one that ends with its job."""
    with suppress(TimeoutError, DistError, RuntimeError, ValueError):
        return call_with_timeout(partial(overwrite, port, pickled, everything=everything), 2)
    return 0


def attack(tmp_path: Path, marker: Path, *, has_store: bool, seconds: float) -> int:
    """Overwrite what the stores of a job hold, for so many seconds or until `marker` exists; return
    the number of values.
    """
    pickled = pickle.dumps(Touch(marker))
    end = time.monotonic() + (START_SECONDS if has_store else seconds)
    count = 0
    while time.monotonic() < end and not marker.exists():
        # The rest breaks a job, which then reads nothing more: not before it has run for some time.
        is_late = time.monotonic() > end - seconds / 2
        ports = set(listening_ports(tmp_path))
        if ports and has_store:
            end = time.monotonic() + seconds
            has_store = False
        # At once, because a port of gloo, which is no store, takes two seconds.
        with ThreadPoolExecutor(max(1, len(ports))) as pool:
            count += sum(pool.map(partial(overwritten, pickled=pickled, everything=is_late), ports))
        time.sleep(0.2)
    return count


def attacked(
    command: list[str], tmp_path: Path, *, has_store: bool = True, seconds: float = SECONDS
) -> tuple[bool, int]:
    """Return whether a job ran what the attack wrote, and the number of values that it wrote."""
    marker = tmp_path / "executed"
    port = torchrun(1)[-1].partition("=")[2]  # a free one
    variables = clean_environment(
        **PACING,
        ATTACKED=str(tmp_path),
        NPROC="2",
        NODE_RANK="0",
        NNODES="1",
        HEAD="127.0.0.1",
        PORT=port,
        PYTHON=sys.executable,
    )
    with subprocess.Popen(
        [*command, *TINY, PACE, "epochs=100000", f"output_dir={tmp_path}", "name=run"],
        env=variables,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as job:
        try:
            count = attack(tmp_path, marker, has_store=has_store, seconds=seconds)
        finally:
            for pid in processes_with(f"ATTACKED={tmp_path}"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.kill()
    return marker.exists(), count


def test_the_attack_works_where_torchrun_uses_pickles(tmp_path: Path) -> None:
    unsafe = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "ddp_trainer",
    ]
    # until it has worked: a busy machine starts torchrun late, and reads what was written late
    assert attacked(unsafe, tmp_path, seconds=START_SECONDS)[0]


@pytest.mark.fault("pickles written to the stores of a start")
@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_was_written_to_a_store_is_executed(way: str, tmp_path: Path) -> None:
    has_store = way != "python"  # one process without a store
    executed, count = attacked(WAYS[way], tmp_path, has_store=has_store)
    assert not executed
    assert count > 0 or not has_store
