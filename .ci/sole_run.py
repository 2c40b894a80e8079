"""One run of .ci/run at a time on a machine, and what a run that was killed has left on it.

A run writes down the name of one folder before it makes anything. Its processes have the folder in
their environment, its files and mounts are in the folder, and the names of its network namespaces
begin with the folder's name. So the next run finds all of it, and nothing that belongs to others.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

VARIABLE = "GATE_FOLDER"
"""The environment variable with the folder; tests/cluster/namespaces.py reads it."""
KILL_SECONDS = 60


@contextmanager
def sole_run(record: Path) -> Iterator[None]:
    """Remove what the run in the file `record` has left, and at the end what this run leaves.

    Within the context, the environment lets tempfile and pytest use the run's folder. If another
    run has the file, the program ends with one line.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(record, flags, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = read(file)["pid"]
            sys.exit(f"error: .ci/run is running on this machine already, as process {other}")
        if left := read(file)["folder"]:
            remove(Path(left))
        # A short name: SLURM's sockets are in it, and their paths may have 108 characters.
        folder = Path(tempfile.gettempdir()) / f"gate-{os.urandom(4).hex()}"
        file.seek(0)
        file.truncate()
        json.dump({"pid": os.getpid(), "folder": str(folder)}, file)
        file.flush()
        folder.mkdir(mode=0o700)
        os.environ.update({VARIABLE: str(folder), "TMPDIR": str(folder)})
        try:
            yield
        finally:
            remove(folder)


def read(file: IO[str]) -> dict[str, Any]:
    """Return the record, with empty values if it is not whole: that run had made nothing yet."""
    file.seek(0)
    try:
        return json.load(file)
    except json.JSONDecodeError:
        return {"pid": "", "folder": ""}


def remove(folder: Path) -> None:
    """End, unmount and delete all that belongs to the run of `folder`, and print how much it was.

    The folder is gone in any case, unless a mount in it could not be removed.
    """
    mounts = mounts_in(folder)
    for point, kind in mounts:
        if kind == "cgroup":
            for state in Path(point).rglob("freezer.state"):
                with suppress(OSError):
                    state.write_text("THAWED")  # a frozen process would not end
    num_ended = kill_all(folder)
    for point, kind in reversed(mounts):  # the last one first
        if kind == "cgroup":
            for path, _, _ in os.walk(point, topdown=False):
                with suppress(OSError):  # the mount itself
                    os.rmdir(path)
        subprocess.run(["umount", "--lazy", point], check=True)
    namespaces = [path.name for path in Path("/run/netns").glob(f"{folder.name}*")]
    for name in namespaces:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    for path in Path("/etc/netns").glob(f"{folder.name}*"):
        shutil.rmtree(path)
    shutil.rmtree(folder, ignore_errors=True)
    if num_ended or mounts or namespaces:
        counts = f"{num_ended} processes, {len(mounts)} mounts, {len(namespaces)} namespaces"
        print(f"--- removed what was left of a run: {counts}", flush=True)


def kill_all(folder: Path) -> int:
    """Kill the processes of the run of `folder` and those that they start, and return how many."""
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS
    while pids := set(processes_of(folder)):
        if time.monotonic() > deadline:
            sys.exit(f"error: these processes of an earlier .ci/run do not end: {pids}")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= pids
        time.sleep(0.05)
    return len(killed)


def processes_of(folder: Path) -> Iterator[int]:
    """Yield the processes with the folder in their environment, or with a file or directory in it.

    A container build has an environment of its own, and slurmstepd overwrites that of its slurmd.
    """
    mark = f"{VARIABLE}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            links = [process / "cwd", process / "root", *(process / "fd").iterdir()]
            is_inside = any(leads_into(folder, link) for link in links)
            if is_inside or mark in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)


def leads_into(folder: Path, link: Path) -> bool:
    """Return whether `link`, which may be gone meanwhile, leads to the folder or into it."""
    with suppress(OSError):
        return Path(os.readlink(link)).is_relative_to(folder)
    return False


def mounts_in(folder: Path) -> list[tuple[str, str]]:
    """Return the mount points in the folder and the types of their file systems, oldest first."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, escaped, kind, *_ = line.split(" ")
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), escaped)
        if Path(point).is_relative_to(folder):
            found.append((point, kind))
    return found
