"""The node check on each node except the head: compares settings, reports, gets the result."""

import asyncio
import os
import secrets
import threading
import time
from contextlib import closing, suppress
from datetime import timedelta
from ipaddress import ip_address

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.launchers.network import ANSWER_SECONDS, JOB_KEY, connect, find_port_error, listen
from ddp_trainer.launchers.node_check.messages import (
    Message,
    StartError,
    decode_error,
    encode_error,
    receive,
)
from ddp_trainer.launchers.node_check.node import RDZV_ID, NodeInfo, PortTakenError

CLOCK_SECONDS = 5.0
"""Seconds by which two clocks may differ, so that times in logs and error files can be compared."""
OTHERS_SECONDS = 5.0
"""Seconds for which a node tries again if another program, or the head of another job, listens at
the head's port.
"""


async def ask_head(node: NodeInfo, error: ConfigError | None) -> None:
    """Wait until the head reports that the nodes can start.

    error: an error that was found on this node; the head gets it with the report.

    Raises:
        ConfigError, TransientError: the reason why the nodes cannot start.
    """
    key = node.key()
    deadline = time.monotonic() + node.timeout
    while True:
        try:
            result = await attempt(node, key, error)
            break
        except (TransientError, ConfigError) as failure:
            if isinstance(failure, PortTakenError | ConfigError):
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
            if time.monotonic() > deadline:
                raise node.named(error or failure) from None
            await asyncio.sleep(0.3)
    if result:
        raise result


async def attempt(node: NodeInfo, key: bytes, error: ConfigError | None) -> StartError | None:
    """Connect to the head, send a report, and return the job's error; None: the node can start.

    Raises:
        ConfigError, TransientError: there is no result; a retry may succeed.
    """
    try:
        reader, writer = await connect(*node.head)
    except OSError as failure:
        raise no_connection(node, failure) from None
    with closing(writer), listen(node.address, 0) as own_port:
        try:
            challenge, is_signed = await receive(reader, key, "", ANSWER_SECONDS)
        except (OSError, ValueError) as failure:
            # a TCPStore sends nothing first, so a timeout may mean that the job already runs
            if isinstance(failure, TimeoutError) and is_running(node):
                return None
            raise node.port_taken() from None
        cause = error or (await find_error(node, challenge) if is_signed else None)
        report = Message(
            rank=node.node_rank,
            address=node.address,
            port=own_port.getsockname()[1],
            nonce=secrets.token_hex(16),
            error=encode_error(cause and node.named(cause)),
            speeds=node.speeds,
            name=node.name,
        )
        # without a common key, the report only helps the head to name this node in its error
        writer.write(report.encode(key if is_signed else b"", challenge.nonce))
        if not is_signed:
            raise node.find_difference(challenge.settings) or node.port_taken()
        with suppress(OSError, ValueError):
            result, is_signed = await receive(reader, key, report.nonce, node.timeout + 10)
            if is_signed:
                return decode_result(node, result)
    raise TransientError(
        f"node 0, the head at {node.head[0]}, has ended or does not answer: see its output"
    )


def decode_result(node: NodeInfo, result: Message) -> StartError | None:
    """Return the error in the result of the head; None if the nodes can start.

    An error of another node gets the prefix that the head has stopped this node.
    """
    cause = decode_error(result.error)
    if cause is None or str(cause).startswith(f"node {node.node_rank} "):
        return cause
    return type(cause)(f"node {node.node_rank}: stopped by the head: {cause}")


async def find_error(node: NodeInfo, head: Message) -> StartError | None:
    """Return an error if settings or clock differ from the head's, or its second port is closed.

    head: the challenge of the head. None: there is no error.
    """
    if difference := node.find_difference(head.settings):
        return difference
    behind = head.time - time.time()
    if abs(behind) > CLOCK_SECONDS:
        return TransientError(
            f"its clock is {abs(behind):.0f} s {'behind' if behind > 0 else 'ahead of'} the head's:"
            " synchronize all clocks (chrony or ntp)"
        )
    return await find_port_error(head.address, head.port, "it cannot reach the head")


def is_running(node: NodeInfo) -> bool:
    """Return whether this elastic job already runs: its store answers at the head's port."""
    if node.min_nodes == node.max_nodes:
        return False
    from torch.distributed import TCPStore  # the import takes seconds

    key = f"{JOB_KEY}/{node.config[RDZV_ID]}"
    second = timedelta(seconds=1)
    answers = []

    def ask() -> None:
        with suppress(OSError, RuntimeError, ValueError, MemoryError):  # no store answers
            store = TCPStore(*node.head, wait_for_workers=False, timeout=second)
            answers.append(store.check([key]))

    # a daemon thread, because TCPStore may wait for ever despite its timeout
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    return answers == [True]


def no_connection(node: NodeInfo, error: OSError) -> TransientError:
    """Return the error to raise after `error`, which the connection to the head has raised."""
    address, port = node.head
    target = f"{address}:{port}"
    if isinstance(error, TimeoutError):
        return TransientError(
            f"{target} does not answer, packets are dropped: open this port in the firewalls"
            " between the nodes"
        )
    if not isinstance(error, ConnectionError):
        return TransientError(
            f"{target} cannot be reached ({os.strerror(error.errno or 0)}): check that the head is"
            " up and ip route shows a route to it"
        )
    seconds = f"{node.timeout:.0f} s"
    is_loopback = ip_address(address).is_loopback
    hint = " (a loopback address: each host reaches only itself)" if is_loopback else ""
    return TransientError(
        f"nothing listened at {target} for {seconds}{hint}: start node 0 there within {seconds} of"
        " this node"
    )
