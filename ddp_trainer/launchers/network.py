"""Host names, routes, ports to listen at, and connections with a timeout. Imports no torch."""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ddp_trainer.config.errors import ConfigError, TransientError

T = TypeVar("T")
ANSWER_SECONDS = 4.0
"""Seconds in which a host must answer; the kernel reports a missing host after 3 s."""
MAX_BYTES = 2**16
"""Maximum bytes of a line that is received on a connection."""


def call_with_timeout(function: Callable[[], T], timeout: float) -> T:
    """Return the result of ``function()`` from a daemon thread; TimeoutError if it is late."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # `future.result` raises it
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future.result(timeout)


def address_of(name: str) -> str:
    """Return the address of a host, preferably IPv4; OSError, UnicodeError if it has none."""
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return str(min(answers, key=lambda answer: answer[0] != socket.AF_INET)[4][0])


def resolve(name: str) -> str:
    """Return the address of the head `name`.

    ConfigError if the name is unknown, TransientError if no name server answers.
    """
    try:
        return address_of(name)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty
        is_silent = getattr(error, "errno", None) == socket.EAI_AGAIN
    kind = TransientError if is_silent else ConfigError
    cause = "the name server does not answer" if is_silent else "unknown name"
    raise kind(
        f"head {name!r} does not resolve on this host ({cause}): give its address, or a name that"
        " every node knows"
    )


def address_towards(address: str) -> str:
    """Return this host's own address on the route to `address`; TransientError if it has none."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: the kernel only looks up the route
        except OSError as error:
            raise TransientError(
                f"this host has no route to the head's address {address} ({error.strerror}): check"
                " that both are in the same network (ip route shows the routes)"
            ) from None
        return probe.getsockname()[0]


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on `address` only; port 0 stands for any free port."""
    return socket.create_server((address, port), family=_family(address), backlog=2048)


async def connect(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and return the streams; OSError if this fails or takes over `ANSWER_SECONDS`."""
    async with asyncio.timeout(ANSWER_SECONDS):
        return await asyncio.open_connection(address, port, limit=MAX_BYTES)


async def check_port(address: str, port: int, failure: str) -> None:
    """Raise TransientError, which begins with `failure`, if this host cannot connect to a port."""
    try:
        (await connect(address, port))[1].close()
    except OSError:
        raise TransientError(
            f"{failure} at {address}:{port}, and ranks connect to each other on ports that the"
            " system chooses: open all ports in the firewalls between the nodes"
        ) from None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
