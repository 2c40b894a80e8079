"""Hosts on one machine: network namespaces with addresses, names and a switch of their own, joined
by cables.
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from processes import clean_environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "launch" / "multinode.sh")
NEEDS = "needs root, iproute2 and util-linux (network namespaces)"


def can_make_hosts() -> bool:
    """Return whether this user and kernel have network namespaces."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare")))


class Hosts:
    """`count` hosts, node0 10.83.0.1 and so on, on one switch; each link is shaped to `rate` (as tc
    says) if given.

    A host has its own interfaces (eth0), /etc/hosts and host name; files and processes are this
    machine's. Use as a context manager: leaving it ends every process on the hosts and removes all
    that was made.
    """

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        run = Path(os.environ.get("GATE_FOLDER", "ddpt")).name  # .ci/sole_run.py looks for it
        self.prefix = f"{run}-{os.getpid()}x{time.monotonic_ns() % 1000}"
        self.names = [f"node{number}" for number in range(count)]
        self.rate = rate
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        switch = self._namespace("switch")
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            namespace = self._namespace(name)
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            ip(
                "-n",
                namespace,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                name,
                "netns",
                switch,
            )
            ip("-n", switch, "link", "set", name, "master", "br0", "up")
            ip("-n", namespace, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            if self.rate:
                shape = f"tc qdisc add dev eth0 root tbf rate {self.rate} burst 256kb latency 50ms"
                subprocess.run(["ip", "netns", "exec", namespace, *shape.split()], check=True)
            self.know(number, {other: self.address(i) for i, other in enumerate(self.names)})

    def close(self) -> None:
        """End all processes on the hosts and remove the namespaces, their cables and their
        files.
        """
        for number in range(len(self.names)):
            self.kill(number)
        for process in self._started:
            process.wait()
        for name in ("switch", *self.names):
            subprocess.run(
                ["ip", "netns", "delete", self._namespace(name)],
                stderr=subprocess.DEVNULL,
                check=False,
            )
            shutil.rmtree(self._etc(name), ignore_errors=True)
        with suppress(OSError):
            Path("/etc/netns").rmdir()  # fails while others use it

    def _namespace(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def _etc(self, name: str) -> Path:
        return Path("/etc/netns") / self._namespace(name)

    @staticmethod
    def address(number: int) -> str:
        """Return the address of a host."""
        return f"10.83.0.{number + 1}"

    def know(self, number: int, names: dict[str, str]) -> None:
        """Let a host know these names (and localhost), and no other."""
        folder = self._etc(self.names[number])
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()
        ]
        (folder / "hosts").write_text("".join(lines))
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # where nobody answers

    def words(self, number: int) -> list[str]:
        """Return the words to put before a command that is to run on a host."""
        name = self.names[number]
        enter = ["ip", "netns", "exec", self._namespace(name), "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$0" && exec "$@"', name]

    def start(
        self, number: int, command: list[str], log: Path, **variables: str
    ) -> subprocess.Popen:
        """Start `command` on a host, with both its outputs appended to `log`."""
        with open(log, "a") as file:
            process = subprocess.Popen(
                [*self.words(number), *command],
                cwd=log.parent,
                env=clean_environment(
                    **({"PYTHONPATH": str(ROOT), "TMPDIR": str(log.parent)} | variables)
                ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def on(self, number: int, command: str) -> None:
        """Run `command` (words and blanks) on a host, to its end."""
        subprocess.run([*self.words(number), *command.split()], check=True, timeout=30)

    def processes(self, number: int) -> list[int]:
        """Return the ids of the processes on a host."""
        listing = subprocess.run(
            ["ip", "netns", "pids", self._namespace(self.names[number])],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(word) for word in listing.stdout.split()]

    def kill(self, number: int) -> None:
        """Kill every process on a host, children born meanwhile too."""
        while pids := self.processes(number):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def cut(self, number: int) -> None:
        """Cut a host's power: its link goes down before its processes do, so that no peer is
        notified.
        """
        self.on(number, "ip link set eth0 down")
        self.kill(number)

    def power_on(self, number: int) -> None:
        """Bring a host that was cut off back, with nothing running."""
        self.on(number, "ip link set eth0 up")

    def ssh(self, folder: Path) -> Path:
        """Write a command that, as ssh does, takes a host and words that the host's shell parses
        again.
        """
        script = folder / "ssh"
        cases = "\n".join(
            f'{name}) exec {shlex.join(self.words(number))} sh -c "$*" ;;'
            for number, name in enumerate(self.names)
        )
        script.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{cases}\nesac\nexit 255\n")
        script.chmod(0o755)
        return script


def ip(*words: str) -> None:
    """Run the ip command."""
    subprocess.run(["ip", *words], check=True, timeout=30)
