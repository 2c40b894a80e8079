"""The node check on each node but the head: compare settings with the head, send a report, wait for
the result.
"""

import asyncio
import os
import secrets
import time
from contextlib import closing
from datetime import timedelta
from ipaddress import ip_address

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.launchers.network import (
    ANSWER_SECONDS,
    call_with_timeout,
    check_port,
    connect,
    listen,
)
from ddp_trainer.launchers.node_check import (
    RDZV_ID,
    Message,
    NodeInfo,
    PortTakenError,
    encode_error,
    raise_error,
    receive,
)

CLOCK_SECONDS = 5.0
"""Seconds by which two clocks may differ. An elastic job treats a node as dead whose clock is 15 s
behind another's.
"""
OTHERS_SECONDS = 5.0
"""Seconds for which a node tries again if another program, or the head of another job, listens at
the head's port.
"""


async def ask_head(node: NodeInfo, error: ConfigError | None) -> None:
    """Wait until this node can start; raise an error if it cannot. error: what is wrong on this
    node; None: nothing.
    """
    key = node.key()
    result = None
    deadline = time.monotonic() + node.timeout
    while result is None:
        try:
            result = await attempt(node, key, encode_error(error and node.named(error)))
        except (TransientError, ConfigError) as failure:
            if isinstance(failure, (PortTakenError, ConfigError)):
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
            if time.monotonic() > deadline:
                raise node.named(error or failure) from None
            await asyncio.sleep(0.3)
    raise_error(result)


async def attempt(node: NodeInfo, key: bytes, error: str) -> str:
    """Connect to the head, send a report, and return the head's result: an encoded error, or "" if
    the job can start.

    error: an error of this node, also encoded; "" if there is none. If this function raises, a
    retry may succeed.
    """
    try:
        reader, writer = await connect(*node.head)
    except OSError as failure:
        raise no_connection(node, failure) from None
    with closing(writer), listen(node.address, 0) as own_port:
        try:
            challenge, is_signed = await receive(reader, key, "", ANSWER_SECONDS)
        except (OSError, ValueError) as failure:
            # a TCPStore sends nothing before its client
            if isinstance(failure, TimeoutError) and is_running(node):
                return ""
            raise node.port_taken() from None
        if is_signed:
            error = error or await compare(node, challenge)
        report = Message(
            rank=node.node_rank,
            address=node.address,
            port=own_port.getsockname()[1],
            nonce=secrets.token_hex(16),
            error=error,
            speeds=node.speeds,
            name=node.name,
        )
        writer.write(report.encode(key if is_signed else b"", challenge.nonce))
        if not is_signed:  # the unsigned report only shows the head that this node exists
            node.check_settings(challenge.settings)
            raise node.port_taken()
        try:
            result, is_signed = await receive(reader, key, report.nonce, node.timeout + 10)
        except (OSError, ValueError):
            result = None
    if result is None or not is_signed:
        raise TransientError(
            f"node 0, the head at {node.head[0]}, has ended or does not answer: see its output"
        )
    # this node is the cause
    if not result.error or result.error[2:].startswith(f"node {node.node_rank} "):
        return result.error
    return f"{result.error[:2]}node {node.node_rank}: stopped by the head: {result.error[2:]}"


async def compare(node: NodeInfo, head: Message) -> str:
    """Compare settings and clock with the head (node 0), try its second port; return an encoded
    error, "" if none.
    """
    behind = head.time - time.time()
    try:
        node.check_settings(head.settings)
        if abs(behind) > CLOCK_SECONDS:
            raise TransientError(
                f"its clock is {abs(behind):.0f} s {'behind' if behind > 0 else 'ahead of'} the"
                " head's, and in an elastic job torchrun treats a node that is 15 s behind as"
                " dead: synchronize all clocks (chrony or ntp)"
            )
        await check_port(head.address, head.port, "it cannot reach the head")
    except (ConfigError, TransientError) as error:
        return encode_error(node.named(error))
    return ""


def is_running(node: NodeInfo) -> bool:
    """Return whether this is an elastic job that already runs: torchrun's store answers at the
    head's port.
    """
    if node.min_nodes == node.max_nodes:
        return False
    from torch.distributed import TCPStore  # takes seconds

    key = f"torch.rendezvous.{node.config[RDZV_ID]}"
    second = timedelta(seconds=1)
    try:  # with a timeout, because torch itself can wait for ever
        return call_with_timeout(
            lambda: TCPStore(*node.head, wait_for_workers=False, timeout=second).check([key]),
            ANSWER_SECONDS,
        )
    # raised by torch if the answer is not that of a store
    except (
        OSError,
        RuntimeError,
        ValueError,
        MemoryError,
    ):
        return False


def no_connection(node: NodeInfo, error: OSError) -> TransientError:
    """Return an error for the user that explains `error`, with which the connection to the head has
    failed.
    """
    target = "{}:{}".format(*node.head)
    seconds = f"{node.timeout:.0f} s"
    if isinstance(error, ConnectionError):
        hint = (
            " (a loopback address: each host reaches only itself)"
            if ip_address(node.head[0]).is_loopback
            else ""
        )
        text = (
            f"nothing listened at {target} for {seconds}{hint}: start node 0 there within {seconds}"
            " of this node"
        )
    elif isinstance(error, TimeoutError):
        text = (
            f"{target} does not answer, packets are dropped: open this port in the firewalls"
            " between the nodes"
        )
    else:
        reason = os.strerror(error.errno or 0)
        text = (
            f"{target} cannot be reached ({reason}): check that the head is up and ip route shows a"
            " route to it"
        )
    return TransientError(text)
