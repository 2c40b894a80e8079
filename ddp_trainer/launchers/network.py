"""Resolves host names, finds routes, listens on ports and connects to them. Imports no torch."""

import asyncio
import socket

from ddp_trainer.config.errors import TransientError

ANSWER_SECONDS = 4.0
"""Time limit, in seconds, for a host's answer; the kernel needs 3 s to report a missing host."""
JOB_KEY = "ddp_trainer/job"
"""The beginning of a key in torchrun's store that names the job, by its rendezvous id."""
MAX_BYTES = 2**16
"""Maximum bytes of a line that is received on a connection."""


def address_of(name: str) -> str:
    """Return a host's IP address, if possible IPv4; OSError or UnicodeError if it has none."""
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return str(min(answers, key=lambda answer: answer[0] != socket.AF_INET)[4][0])


def address_towards(address: str) -> str:
    """Return the address from which this host sends to `address`; TransientError without route."""
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
    """Return a socket that listens on `address`; OSError if it cannot.

    address "": all addresses of this host. port 0: a free port.
    """
    return socket.create_server((address, port), family=_family(address), backlog=2048)


async def connect(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and return the streams; OSError if this fails or lasts more than `ANSWER_SECONDS`."""
    async with asyncio.timeout(ANSWER_SECONDS):
        return await asyncio.open_connection(address, port, limit=MAX_BYTES)


async def find_port_error(address: str, port: int, failure: str) -> TransientError | None:
    """Return an error that begins with `failure` if this host cannot connect, else None."""
    try:
        (await connect(address, port))[1].close()
    except OSError:
        return TransientError(
            f"{failure} at {address}:{port}, and ranks connect to each other on ports that the"
            " system chooses: open all ports in the firewalls between the nodes"
        )
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
