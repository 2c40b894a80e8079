"""Host names, addresses, ports and connections as this host sees them. Imports no torch."""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ddp_trainer.config.errors import ConfigError, TransientError

T = TypeVar("T")
ANSWER_SECONDS = 4.0
"""How many seconds a host may take to answer: the kernel needs 3 s to notice that no host has the address."""
MAX_BYTES = 2**16
"""The longest line that a connection receives."""


def call_with_timeout(function: Callable[[], T], timeout: float) -> T:
    """Return ``function()``; raise TimeoutError after `timeout` seconds, and let a daemon thread finish the call."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # `future.result` raises it
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future.result(timeout)


def address_of(name: str) -> str:
    """Return the address of the host `name`, preferably IPv4; OSError or UnicodeError if `name` does not resolve."""
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return str(min(answers, key=lambda answer: answer[0] != socket.AF_INET)[4][0])


def resolve(name: str, *, timeout: float) -> str:
    """Return the address of the host `name`; ConfigError if it is unknown, TransientError if no name server answers."""
    try:
        return call_with_timeout(lambda: address_of(name), timeout)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long
        is_silent = isinstance(error, TimeoutError) or getattr(error, "errno", None) == socket.EAI_AGAIN
        cause = "the name server does not answer" if is_silent else "unknown name"
    raise (TransientError if is_silent else ConfigError)(
        f"head {name!r} does not resolve on this host ({cause}): give its address, or a name that every node knows"
    )


def address_towards(address: str) -> str:
    """Return the address from which this host sends to `address`; TransientError if there is no route."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: the kernel only looks up the route
        except OSError as error:
            raise TransientError(
                f"this host has no route to the head's address {address} ({error.strerror}): check that "
                "both are in the same network (ip route shows the routes)"
            ) from None
        return probe.getsockname()[0]


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on `address` only; port 0 stands for any free port."""
    return socket.create_server((address, port), family=_family(address), backlog=2048)


async def connect(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of a new connection; OSError if it fails or takes too long."""
    async with asyncio.timeout(ANSWER_SECONDS):
        return await asyncio.open_connection(address, port, limit=MAX_BYTES)


async def check_port(address: str, port: int, failure: str) -> None:
    """Raise TransientError if this host cannot connect to a port that the system has chosen on another host."""
    try:
        (await connect(address, port))[1].close()
    except OSError:
        raise TransientError(
            f"{failure} at {address}:{port}, and ranks connect to each other on ports that the system chooses: open "
            "all ports in the firewalls between the nodes"
        ) from None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
