"""The head, node 0: receives the others, compares them with itself, and tells all of them one verdict."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import closing, suppress
from dataclasses import replace

from ddp_trainer.network import StartError, is_torch_store, listen
from ddp_trainer.rollcall import ATTEMPT_SECONDS, CLOCK_SECONDS, GREETING, Hello, Plan, closed_fault

MORE_NODES_SECONDS = 3.0
"""How long an elastic job that has its minimum waits for the next node."""
LINGER_SECONDS = 3.0
"""How long a head that has found a fault early stays to tell it to those who come later."""


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
