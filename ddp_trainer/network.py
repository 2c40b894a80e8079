"""Addresses, routes and ports as this host sees them; what is wrong with them, in a sentence. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import queue
import secrets
import socket
import struct
import threading


class StartError(Exception):
    """What keeps this node or job from starting: cause and way out, one sentence for the user."""


def resolve(name: str, *, timeout: float) -> str:
    """Return the address of the host `name` (IPv4 if it has one), asking for at most `timeout` seconds.

    Raises:
        StartError: there is none, or nobody answered.
    """
    answers: queue.SimpleQueue[list | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of a name is empty or too long
            answers.put(error if isinstance(error, OSError) else OSError(0, "not a host name"))

    threading.Thread(target=ask, daemon=True).start()  # a silent name server can take a minute
    try:
        answer = answers.get(timeout=timeout)
    except queue.Empty:
        raise StartError(
            f"head {name!r} was not resolved within {timeout:.0f} s, the name server is silent: give an address"
        ) from None
    if isinstance(answer, OSError):
        raise StartError(
            f"head {name!r} does not resolve on this host ({answer.strerror}): give its address, "
            "or a name that every node knows"
        )
    by_family = sorted(answer, key=lambda entry: entry[0] != socket.AF_INET)
    return by_family[0][4][0]


def is_loopback(address: str) -> bool:
    """Say whether `address` is one that every host has for itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_literal(name: str) -> bool:
    """Say whether `name` is an address, not a name."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def is_own(address: str) -> bool:
    """Say whether `address` is one of this host's."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(address: str) -> str:
    """Return the address of this host from which `address` would be reached.

    Raises:
        StartError: there is no route to it.
    """
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: only asks the kernel for the route
            return probe.getsockname()[0]
    except OSError as error:
        raise StartError(
            f"this host has no route to the head's address {address} ({error.strerror}): is it in the same network? "
            "ip route tells"
        ) from None


def addresses() -> dict[str, str]:
    """Return this host's interfaces that have an IPv4 address, and that address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an IPv4 address
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def route_to(address: str) -> str | None:
    """Return the name of the network interface whose address this host would use to reach `address`."""
    try:
        own = address_towards(resolve(address, timeout=10))
        return next((name for name, its in addresses().items() if its == own), None)
    except (StartError, OSError):
        return None


def listen(port: int) -> socket.socket:
    """Return a socket that listens at `port` of all addresses, as torchrun's store will; 0 is any free port.

    Raises:
        OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):  # otherwise IPv6 is switched off here
                raise
    return socket.create_server(("", port), backlog=1024)


def is_torch_store(address: str, port: int, *, rdzv_id: str | None = None, timeout: float = 2) -> bool:
    """Say whether a torch TCPStore listens there; with `rdzv_id`, whether it is the rendezvous of that job.

    Source: torch/csrc/distributed/c10d/TCPStoreBackend.hpp (the first byte of a query says what it is).
    """
    validate, check, ping, magic = 0, 5, 13, 0x3C85F7CE
    nonce = secrets.randbits(32)
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            connection.sendall(struct.pack("<BIBI", validate, magic, ping, nonce))
            if _receive(connection, 4) != struct.pack("<I", nonce):
                return False
            if rdzv_id is None:
                return True
            key = f"/torch.rendezvous.{rdzv_id}".encode()
            connection.sendall(struct.pack("<BQQ", check, 1, len(key)) + key)
            return _receive(connection, 1) == b"\0"
    except OSError:
        return False


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
