"""Start-up faults, each made for real on hosts of their own: the cause is named on the right host
within 30 s.
"""

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import wait_for
from runs import TINY

from cluster.namespaces import ROOT, SCRIPT, Hosts

SECONDS = 30
"""How long it may take until a node has ended with its error, of which the nodes wait this long for
each other:
"""
JOIN_SECONDS = "15"


@dataclass(frozen=True)
class Ended:
    """How multinode.sh ended on a host."""

    code: int
    seconds: float
    output: str

    @property
    def error(self) -> str:
        """Its one error."""
        [line] = [line for line in self.output.splitlines() if line.startswith("error: ")]
        return line


class Launch:
    """multinode.sh begun on hosts, to be ended by a fault."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.nodes: dict[int, tuple[subprocess.Popen, float]] = {}

    def start(
        self,
        *numbers: int,
        overrides: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        **variables: str,
    ) -> None:
        """Start nodes; a variable replaces the one that the node would have."""
        for number in numbers:
            own = {
                "NNODES": "2",
                "NODE_RANK": str(number),
                "HEAD": "node0",
                "NPROC": "1",
                "JOIN_SECONDS": JOIN_SECONDS,
            }
            command = [*prefix, SCRIPT, *TINY, f"output_dir={self.folder}", "name=run", *overrides]
            process = self.hosts.start(
                number, command, self.folder / f"node{number}.log", **(own | variables)
            )
            self.nodes[number] = process, time.monotonic()

    def end(self, code: int, *others: int) -> dict[int, Ended]:
        """Return how the nodes ended, in time and with exit code `code`, or each with its own."""
        ended: dict[int, Ended] = {}
        while len(ended) < len(self.nodes):
            for number, (process, began) in self.nodes.items():
                seconds = time.monotonic() - began
                output = (self.folder / f"node{number}.log").read_text()
                assert seconds < 2 * SECONDS, f"node {number} is still silent: {output}"
                if number not in ended and process.poll() is not None:
                    ended[number] = Ended(
                        process.returncode, seconds, (self.folder / f"node{number}.log").read_text()
                    )
            time.sleep(0.05)
        for number, node in ended.items():
            print(f"node {number}: exit {node.code} after {node.seconds:.1f} s: {node.output}")
        for number, node in ended.items():
            assert node.code == ([code, *others] if others else [code] * 4)[number], node.output
            # a training that goes well may take longer on a slow machine
            assert node.code == 0 or node.seconds < SECONDS
            assert "Traceback" not in node.output
        return ended


@pytest.fixture
def launch(hosts: Hosts, tmp_path: Path) -> Launch:
    return Launch(hosts, tmp_path)


def test_the_heads_name_does_not_resolve(launch: Launch) -> None:
    launch.start(1, HEAD="nowhere")
    assert "head 'nowhere' does not resolve on this host" in launch.end(1)[1].error


def test_the_heads_name_resolves_to_a_loopback_address(launch: Launch) -> None:
    launch.hosts.know(0, {"node0": "127.0.1.1"})
    launch.start(0, 1)
    ended = launch.end(2, 1)
    assert "head 'node0' resolves to 127.0.1.1 on this host" in ended[0].error
    assert "nothing listened at 10.83.0.1:29400" in ended[1].error


@pytest.mark.parametrize("interface", ["", "-i eth0"])
def test_a_firewall_drops_what_goes_to_the_port(launch: Launch, interface: str) -> None:
    launch.hosts.on(0, f"iptables -A INPUT {interface} -p tcp --dport 29400 -j DROP")
    launch.start(0, 1)
    ended = launch.end(1)
    assert "10.83.0.1:29400 does not answer, packets are dropped" in ended[1].error
    assert interface or "this host cannot reach itself at 10.83.0.1:29400" in ended[0].error
    assert not interface or "1 of 2 nodes came within 15 s, missing: node 1" in ended[0].error


@pytest.mark.parametrize("closed", [0, 1])
def test_a_firewall_knows_only_the_port_of_the_rendezvous(launch: Launch, closed: int) -> None:
    """gloo and NCCL would hang at the ports that the system picks for them."""
    launch.hosts.on(closed, "iptables -A INPUT -p tcp --syn ! --dport 29400 -j DROP")
    launch.start(0, 1)
    ended = launch.end(1)
    which = (
        "it cannot reach the head at 10.83.0.1:"
        if closed == 0
        else "the head cannot reach it at 10.83.0.2:"
    )
    assert f"error: node 1 (10.83.0.2): {which}" in ended[0].error
    assert which in ended[1].error


def test_there_is_no_route_to_the_head(launch: Launch) -> None:
    launch.hosts.on(1, "ip route add blackhole 10.83.0.1/32")
    launch.start(1)
    assert "no route to the head's address 10.83.0.1" in launch.end(1)[1].error


def test_the_head_is_down(launch: Launch) -> None:
    launch.hosts.cut(0)
    launch.start(1)
    assert "10.83.0.1:29400 cannot be reached (No route to host)" in launch.end(1)[1].error


STORE = "dist.TCPStore('10.83.0.1', 29400, is_master=True, wait_for_workers=False)"


@pytest.mark.parametrize(
    "program",
    [
        ("-m", "http.server", "29400", "--bind", "0.0.0.0"),
        ("-c", f"import time, torch.distributed as dist; store = {STORE}; time.sleep(99)"),
    ],
    ids=["web server", "rendezvous of another job"],
)
def test_another_program_has_the_port(launch: Launch, program: tuple[str, ...]) -> None:
    launch.hosts.start(0, [sys.executable, *program], launch.folder / "program.txt")
    check = [*launch.hosts.words(0), "ss", "-Hltn", "sport = :29400"]
    wait_for(
        lambda: subprocess.run(check, capture_output=True, timeout=10, check=True).stdout,
        seconds=60,
    )
    launch.start(0, 1)
    for node in launch.end(1).values():
        assert "port 29400 is taken on the head 10.83.0.1 by another program or job" in node.error


def test_a_node_is_missing(launch: Launch) -> None:
    launch.start(0, 1, 3, NNODES="4")
    ended = launch.end(1)
    assert "error: 3 of 4 nodes came within 15 s, missing: node 2" in ended[0].error
    for number in (1, 3):
        assert f"node {number}: stopped by the head: 3 of 4 nodes came" in ended[number].error


def test_two_nodes_have_the_same_rank(launch: Launch) -> None:
    launch.start(0, 1, 2, NNODES="4")
    launch.start(3, NNODES="4", NODE_RANK="2")
    assert "error: node rank 2 was given to 10.83.0." in launch.end(2)[0].error


def test_two_nodes_are_the_head(launch: Launch) -> None:
    launch.start(1, NODE_RANK="0")
    assert "but 10.83.0.1 is not an address of this host (10.83.0.2)" in launch.end(2)[1].error


def test_a_node_has_another_torch(launch: Launch) -> None:
    other = launch.folder / "other" / "torch-1.13.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n")
    launch.start(0)
    launch.start(1, PYTHONPATH=f"{other.parent}:{ROOT}")
    assert "error: node 1 (10.83.0.2): torch is 1.13.1 here and 2." in launch.end(2)[0].error


def test_a_node_has_another_ddp_trainer(launch: Launch) -> None:
    other = launch.folder / "other"
    for name in ("ddp_trainer", "conf"):
        shutil.copytree(ROOT / name, other / name)
    (other / "ddp_trainer" / "version.py").write_text('__version__ = "99.0"\n')
    launch.start(0)
    launch.start(1, PYTHONPATH=str(other))
    assert "error: node 1 (10.83.0.2): ddp_trainer is 99.0 here and " in launch.end(2)[0].error


def test_a_nodes_clock_is_late(launch: Launch) -> None:
    launch.start(0)
    launch.start(1, prefix=("faketime", "-f", "-40s"))
    assert (
        "error: node 1 (10.83.0.2): its clock is 40 s behind the head's" in launch.end(1)[0].error
    )


@pytest.mark.parametrize("secret", ["", "shared"])
def test_a_node_has_another_config(launch: Launch, secret: str) -> None:
    launch.start(0, DDP_TRAINER_JOB_SECRET=secret)
    launch.start(1, DDP_TRAINER_JOB_SECRET=secret, overrides=("seed=1",))
    ended = launch.end(*(2, 2) if secret else (1, 2))
    error = (
        "error: node 1 (10.83.0.2): other settings than on the head (seed): use the same on all"
        " nodes"
    )
    assert ended[1].error == error
    if secret:
        assert ended[0].error == error
    else:  # a node without the key cannot be told from another program
        assert (
            "1 of 2 nodes came within 15 s, missing: node 1; 10.83.0.2 came as node 1 with"
            in ended[0].error
        )


def test_nccl_is_asked_for_without_a_gpu(launch: Launch) -> None:
    launch.start(0, 1, overrides=("backend=nccl",))
    assert (
        "error: node 0 (10.83.0.1): backend in the config needs a GPU and this node has none"
        in launch.end(2)[0].error
    )


@pytest.mark.parametrize(("setting", "code"), [("backend=auto", 2), ("device=cpu", 0)])
def test_shared_memory_is_too_small_for_nccl_but_not_for_gloo(
    setting: str, code: int, launch: Launch
) -> None:
    """/dev/shm is as small as Docker makes it; of the GPUs, only the names of their devices are
    there.
    """
    small = (
        'd=$(mktemp -d); mount -t tmpfs tmpfs "$d"; cp -a /dev/null /dev/zero /dev/random'
        ' /dev/urandom "$d";mkdir "$d/shm"; touch "$d/nvidia0" "$d/nvidia1"; mount --rbind "$d"'
        ' /dev;mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$0" "$@"'
    )
    launch.start(0, overrides=(setting,))
    launch.start(1, overrides=(setting,), prefix=("unshare", "--mount", "sh", "-c", small))
    error = (
        "error: node 1 (10.83.0.2): /dev/shm has 64 MiB left and NCCL needs 512 MiB between 2 GPUs"
    )
    assert (error in launch.end(code)[0].output) == (code == 2)


def test_a_bad_config_is_one_error_and_nothing_starts(launch: Launch) -> None:
    launch.start(0, overrides=("optimiser=sgd",))
    ended = launch.end(2)[0]
    assert ended.output.count("\n") == 1
    assert ended.output.startswith("error: ")
