"""The other nodes: say hello to the head and hear its verdict."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from ddp_trainer.network import StartError, is_loopback, is_torch_store, listen
from ddp_trainer.rollcall import ATTEMPT_SECONDS, GREETING, CalledOffError, Hello, Plan, closed_fault

GREETING_SECONDS = 2.0
"""How long whoever listens at the port has to greet before it is asked whether it is torchrun's store."""


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
