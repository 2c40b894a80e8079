"""The roll call of nodes: the head holds the port of torchrun's store, the others come, and all hear one verdict.

A node says who it is and what it has; the head compares that with itself. Whoever finds the store of a running
elastic job at the port may join it without more. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import platform
import socket
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ddp_trainer import __version__
from ddp_trainer.network import StartError, is_loopback, is_torch_store, listen

GREETING = b"ddp_trainer preflight\n"
GREETING_SECONDS = 2.0
"""How long whoever listens at the port has to greet before it is asked whether it is torchrun's store."""
ATTEMPT_SECONDS = 4.0
"""How long one attempt to connect may take; the kernel needs 3 s to say that nobody has the address."""
MORE_NODES_SECONDS = 3.0
"""How long an elastic job that has its minimum waits for the next node."""
LINGER_SECONDS = 3.0
"""How long a head that has found a fault early stays to tell it to those who come later."""
CLOCK_SECONDS = 5.0
"""How far clocks may be apart: torchrun compares them to see which node is dead, and allows 15 s in all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which nodes are to meet, where, and for how long."""

    node_rank: int
    min_nodes: int
    max_nodes: int
    """More than `min_nodes` in an elastic job."""
    port: int
    timeout: float
    """Seconds to wait for the others."""
    rdzv_id: str | None = None
    """torchrun's name of the job, if a rendezvous found at the port is to be told from another job's."""

    @property
    def nnodes(self) -> str:
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a node says of itself."""

    node_rank: int
    nnodes: str
    address: str = ""
    port: int = 0
    """Where it can be reached for a moment, as gloo and NCCL will want to: a port like any other."""
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    clock_behind: float = 0.0
    """Seconds by which this node's clock is behind the head's, and how sure that is."""
    clock_error: float = 0.0
    fault: str | None = None
    """What this node has itself found wrong."""

    @property
    def name(self) -> str:
        return f"node {self.node_rank} ({self.address})"


class CalledOffError(StartError):
    """The head has told why the start is off."""


def versions() -> dict[str, str]:
    """Return the version of all that has to be the same on all nodes, without importing it.

    Raises:
        StartError: a package is not installed.
    """
    found = {"ddp_trainer": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "torchvision"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            raise StartError(
                f"{package} is not installed in {sys.prefix}: make .venv/installed, or set PYTHON"
            ) from None
    return found


# --- the head -------------------------------------------------------------------------------------


def wait_for_nodes(hello: Hello, plan: Plan) -> None:
    """Hold the port until enough nodes have come, tell them all the verdict, and free it.

    Raises:
        StartError: the port is taken, nodes are missing, or one does not fit.
    """
    try:
        listener = listen(plan.port)
    except OSError as error:
        raise StartError(port_fault(plan.port, error)) from None
    with listener:
        fault = asyncio.run(Head(hello, plan).verdict(listener))
    if fault:
        raise StartError(fault)


def port_fault(port: int, error: OSError) -> str:
    """Say why this host cannot listen at `port`."""
    if isinstance(error, PermissionError):
        return f"port {port} cannot be opened on the head ({error.strerror}): choose one from 1024 to 65535"
    who = "the rendezvous of another torchrun" if is_torch_store("127.0.0.1", port) else "another program"
    return (
        f"port {port} is taken on the head by {who} (ss -ltnp names it): end that, or choose another port on all nodes"
    )


class Head:
    """Node 0: receives the others, compares them with itself, and tells all of them one verdict."""

    def __init__(self, hello: Hello, plan: Plan) -> None:
        self.hello, self.plan = hello, plan
        self.nodes: dict[int, Hello] = {0: hello}
        self.fault = f"{hello.name}: {hello.fault}" if hello.fault else None
        self._changed, self._verdict = asyncio.Event(), asyncio.Event()
        self._guests: set[asyncio.Task] = set()

    async def verdict(self, listener: socket.socket) -> str | None:
        """Wait for the nodes and tell them. Return the fault, if there is one."""
        with closing(listen(0)) as back:  # a port like any other, to see whether a firewall knows only the one
            self.back_port = back.getsockname()[1]
            server = await asyncio.start_server(self._receive, sock=listener)
            deadline = time.monotonic() + self.plan.timeout
            await self._wait(deadline)
            if self.fault is None and len(self.nodes) < self.plan.min_nodes:
                self.fault = self._missing()
            self._verdict.set()
            if self.fault and not self._is_full() and time.monotonic() < deadline:
                await asyncio.sleep(LINGER_SECONDS)
            server.close()
            if self._guests:
                await asyncio.wait(self._guests, timeout=1)
        return self.fault

    async def _wait(self, deadline: float) -> None:
        """Wait until all nodes have come, one does not fit, or time is up."""
        while not self._is_full() and self.fault is None:
            enough = len(self.nodes) >= self.plan.min_nodes
            self._changed.clear()
            try:
                left = deadline - time.monotonic()
                await asyncio.wait_for(self._changed.wait(), min(left, MORE_NODES_SECONDS) if enough else left)
            except TimeoutError:
                return

    def _is_full(self) -> bool:
        return len(self.nodes) == self.plan.max_nodes

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talk with one who has connected; who does not speak our language is none of the nodes."""
        task = asyncio.current_task()
        assert task is not None
        self._guests.add(task)
        with suppress(OSError, ValueError, TypeError, asyncio.IncompleteReadError):
            await self._talk(reader, writer)
        self._guests.discard(task)
        writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        while (line := await reader.readline()) == b"clock\n":
            writer.write(json.dumps({"time": time.time(), "port": self.back_port}).encode() + b"\n")
        node = replace(Hello(**json.loads(line)), address=writer.get_extra_info("peername")[0].removeprefix("::ffff:"))
        node = await self._call_back(node)
        self._admit(node)
        gone, decided = asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(self._verdict.wait())
        await asyncio.wait((gone, decided), return_when=asyncio.FIRST_COMPLETED)
        if not decided.done() and self.nodes.get(node.node_rank) is node:
            del self.nodes[node.node_rank]  # it was stopped, or lost, while it waited
        for waiting in (gone, decided):
            waiting.cancel()
        writer.write(json.dumps({"fault": self.fault}).encode() + b"\n")
        await writer.drain()

    async def _call_back(self, node: Hello) -> Hello:
        """Return `node`, with a fault if it cannot be reached at the port it names."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(node.address, node.port), ATTEMPT_SECONDS)
            writer.close()
        except OSError:  # a TimeoutError is one
            return replace(
                node, fault=node.fault or closed_fault(f"the head cannot reach it at {node.address}:{node.port}")
            )
        return node

    def _admit(self, node: Hello) -> None:
        """Count `node` among those who have come, and look whether it fits."""
        other = self.nodes.get(node.node_rank)
        self.fault = self.fault or misfit(self.hello, node, other)
        self.nodes[node.node_rank] = node
        self._changed.set()

    def _missing(self) -> str:
        """Say who has not come."""
        few, many = self.plan.min_nodes, self.plan.max_nodes
        of = str(many) if few == many else f"at least {few}"
        missing = ", ".join(f"node {rank}" for rank in range(many) if rank not in self.nodes)
        return (
            f"{len(self.nodes)} of {of} nodes came within {self.plan.timeout:.0f} s, missing: {missing} "
            "(start them within as many seconds of this one, or see there what keeps them)"
        )


def misfit(head: Hello, node: Hello, other: Hello | None) -> str | None:
    """Say why `node` cannot start with `head`; `other` came before with the same node rank."""
    if node.fault:
        return f"{node.name}: {node.fault}"
    if other is not None:
        where = "twice" if other.address == node.address else f"to {other.address} and {node.address}"
        return f"node rank {node.node_rank} was given {where}: number the nodes from 0, each once"
    if node.nnodes != head.nnodes:
        return f"{node.name} was started for {node.nnodes} nodes and the head for {head.nnodes}: say the same on all"
    for package, wanted in head.versions.items():
        if (found := node.versions.get(package)) != wanted:
            return f"{node.name} has {package} {found} and the head has {wanted}: install the same on all nodes"
    if abs(node.clock_behind) > CLOCK_SECONDS + node.clock_error:
        way = "behind" if node.clock_behind > 0 else "ahead of"
        return (
            f"the clock of {node.name} is {abs(node.clock_behind):.0f} s {way} the head's, and torchrun takes a node "
            "that is 15 s behind for dead: set the clocks of all nodes (chrony or ntp)"
        )
    keys = sorted(head.config.keys() | node.config.keys())
    changes = [f"{k}: {head.config.get(k)} → {node.config.get(k)}" for k in keys
               if head.config.get(k) != node.config.get(k)]  # fmt: skip
    if changes:
        return f"{node.name} was started with another config ({'; '.join(changes)}): use one command line on all nodes"
    return None


def closed_fault(what: str) -> str:
    """Say that `what` failed at a port that anybody may use."""
    return (
        f"{what}, and ranks connect to each other on ports that the system picks: let all of them pass the firewall "
        "between the nodes"
    )


# --- the other nodes ------------------------------------------------------------------------------


def ask_head(hello: Hello, address: str, plan: Plan, *, deadline: float) -> None:
    """Return when the head says that all may start, or when torchrun's store of this job is there already.

    Raises:
        StartError: the head cannot be reached, or says no.
    """
    where, fault = f"{address}:{plan.port}", ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, plan.port), timeout=min(left, ATTEMPT_SECONDS)) as connection:
                said = greeting(connection)
                if said == GREETING:
                    return follow(hello, connection, patience=2 * plan.timeout)
            is_store = is_torch_store(address, plan.port)
            if is_store and (plan.rdzv_id is None or is_torch_store(address, plan.port, rdzv_id=plan.rdzv_id)):
                return None
            fault = stranger_fault(where, said, is_store=is_store)
        except OSError as error:
            is_cut_short = isinstance(error, TimeoutError) and left < ATTEMPT_SECONDS
            if not (fault and is_cut_short):
                fault = connect_fault(error, hello, address, plan)
        time.sleep(min(0.3, max(0.0, deadline - time.monotonic())))
    raise StartError(f"{hello.name}: {hello.fault or fault or 'no time was left to look for the head'}")


def greeting(connection: socket.socket) -> bytes:
    """Return the line that the other side begins with; torchrun's store says nothing before it is asked."""
    connection.settimeout(GREETING_SECONDS)
    try:
        return connection.recv(len(GREETING))
    except TimeoutError:
        return b""


def follow(hello: Hello, connection: socket.socket, *, patience: float) -> None:
    """Say hello to the head and return when it says that all may start.

    Raises:
        ConnectionError: the head is gone.
        CalledOffError: it says why not.
    """
    connection.settimeout(patience)
    with connection.makefile("rwb") as lines, closing(listen(0)) as back:
        clocks = [clock(lines) for _ in range(3)]
        error, behind, back_port = min(clocks)
        fault = hello.fault
        head = connection.getpeername()[0]
        try:
            socket.create_connection((head, back_port), timeout=ATTEMPT_SECONDS).close()
        except OSError:
            fault = fault or closed_fault(f"it cannot reach the head at {head}:{back_port}")
        ready = replace(hello, port=back.getsockname()[1], clock_behind=behind, clock_error=error, fault=fault)
        lines.write(json.dumps(asdict(ready)).encode() + b"\n")
        lines.flush()
        try:
            verdict = lines.readline()
        except TimeoutError:
            raise StartError(f"{hello.name}: the head has not answered for {patience:.0f} s: is it still up?") from None
        if not verdict:
            raise ConnectionError("the head has ended before all nodes had come")
    if fault := json.loads(verdict)["fault"]:
        raise CalledOffError(f"node {hello.node_rank}: called off by the head: {fault}")


def clock(lines: Any) -> tuple[float, float, int]:
    """Return how unsure the next is, by how many seconds this clock is behind the head's, and the head's other port."""
    asked = time.time(), time.monotonic()
    lines.write(b"clock\n")
    lines.flush()
    told = json.loads(lines.readline() or "null")
    if told is None:
        raise ConnectionError("the head has ended before all nodes had come")
    half = (time.monotonic() - asked[1]) / 2
    return half, told["time"] - (asked[0] + half), told["port"]


def stranger_fault(where: str, said: bytes, *, is_store: bool) -> str:
    """Say who else is at the port."""
    greeted = f", which says {said.decode(errors='replace').strip()!r}" if said else ""
    who = "the rendezvous of another job" if is_store else f"another program{greeted}"
    return f"{where} on the head is taken by {who}: end that, or choose another port on all nodes"


def connect_fault(error: OSError, hello: Hello, address: str, plan: Plan) -> str:
    """Say why the head cannot be reached."""
    seconds, where = f"{plan.timeout:.0f} s", f"{address}:{plan.port}"
    if isinstance(error, ConnectionError):
        hint = ", and that is each host's own address" if is_loopback(address) else ""
        return (
            f"nothing listened at {where} for {seconds}{hint}: start node 0 there, "
            f"within as many seconds of this one, and see what it says"
        )
    if isinstance(error, TimeoutError):
        return (
            f"{where} does not answer, packets are dropped: let a firewall between {hello.address} and the head "
            "pass this port, or choose one that it passes"
        )
    return f"{where} cannot be reached ({error.strerror}): see that the head is up and that ip route leads to it"
