"""Signed messages in a TCPStore to which any program can write."""

import hmac
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import DistStoreError, TCPStore

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.launch.network import call_with_timeout

T = TypeVar("T")
STORE_SECONDS = 5.0
"""How long one access to the store may take."""
LOOK_SECONDS = 0.3
"""How long a node looks for a message that another program keeps from it."""
MAX_BYTES, MAX_TEXT = 2**18, 500
HEAD, NODE = "ddp_trainer/head", "ddp_trainer/node/"
READY, READ, START = "ready", "read", "start"
ADDRESS = re.compile(r"[0-9a-fA-F.:]{2,40}(%\w{1,15})?", re.ASCII)
IS_VALID: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable(),
    int: lambda value: type(value) is int and 0 <= value < 2**16,
    float: lambda value: type(value) in (int, float) and 0 <= value < 1e11,
    dict[str, str]: lambda value: isinstance(value, dict) and all(map(IS_VALID[str], [*value, *value.values()])),
}


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a node publishes several times a second; raises ValueError for a value that no node sends."""

    nonce: str
    """Chosen by the head every few seconds and repeated by the others: an old report cannot be used again."""
    nodes: dict[str, str]
    """A random word of this process, and its node rank; from the head, those of all reports that it has read."""
    address: str
    port: int
    """A port that the system has chosen, as for ranks: the other side must be able to connect to it."""
    time: float
    settings: dict[str, str] = field(default_factory=dict)
    """From the head: `NodeInfo.settings`."""
    result: str = ""
    """READY, READ, or the error of this node; from the head, START or an error."""

    def __post_init__(self) -> None:
        are_valid = (IS_VALID[item.type](getattr(self, item.name)) for item in fields(self))
        if not all(are_valid) or not ADDRESS.fullmatch(self.address):
            raise ValueError("not a message of a node")


def parse(body: bytes) -> Message | None:
    """Return the message that `body` is in JSON, None if it is none."""
    try:
        tree = json.loads(body[:MAX_BYTES])
        return Message(**{item.name: tree[item.name] for item in fields(Message)})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def encode_error(error: Exception) -> str:
    """Return an error as a result: its exit code, and its text without control characters."""
    text = "".join(character if character.isprintable() else " " for character in str(error))
    return f"{2 if isinstance(error, ConfigError) else 1} {text}"[:MAX_TEXT]


def check_result(result: str) -> None:
    """Raise the error that `encode_error` has encoded, if it is one."""
    if result[:2] in ("1 ", "2 "):
        raise (ConfigError if result[0] == "2" else TransientError)(result[2:])


class Board:
    """The messages in a store. Each has a name that only nodes with the key can derive, the only one that they trust,
    and a public name, by which other nodes find out why they do not belong to the job.
    """

    def __init__(self, store: TCPStore, key: bytes) -> None:
        self.store, self.key = store, key

    def publish(self, name: str, message: Message, *, nonce: str = "") -> None:
        """Write `message` in place of the last one of this name and nonce; OSError if the store is gone."""
        private, body = self._private(name, nonce), json.dumps(asdict(message)).encode()
        data = (self._mac(private, body) + body).decode()
        for key in (private, name):
            access(partial(self.store.set, key, data))

    def read(self, name: str, *, nonce: str = "", nodes: dict[str, str] | None = None) -> Message | None:
        """Return the message of this name and nonce if there is one, with these `nodes`; OSError if the store is gone.

        If there is another one, it looks again for a moment: nodes replace at once what other programs write.
        """
        key, end = self._private(name, nonce), time.monotonic() + LOOK_SECONDS
        while data := self.get(key):
            mac, body = data[:64], data[64:]
            message = parse(body) if hmac.compare_digest(mac, self._mac(key, body)) else None
            if message and (nodes or {}).items() <= message.nodes.items():
                return message
            if time.monotonic() > end:
                break
        return None

    def read_untrusted(self, name: str) -> Message | None:
        """Return what any program may have written as the message of this name; OSError if the store is gone."""
        return parse(self.get(name)[64:])

    def get(self, key: str) -> bytes:
        """Return what the store has for `key`, empty if nothing; OSError if the store is gone."""

        def get() -> bytes:
            try:
                return self.store.get(key) if self.store.check([key]) else b""
            except DistStoreError:  # deleted between the two
                return b""

        return access(get)

    def _private(self, name: str, nonce: str) -> str:
        return hmac.digest(self.key, f"name {name} {nonce}".encode(), "sha256").hex()

    def _mac(self, key: str, body: bytes) -> bytes:
        return hmac.digest(self.key, key.encode() + body, "sha256").hex().encode()


def open_store(head: tuple[str, int], *, descriptor: int | None = None) -> TCPStore:
    """Return a client of the TCPStore at this address and port, or, with the descriptor of a socket that listens there,
    the store itself; OSError if that fails.
    """
    timeout, is_master = timedelta(seconds=1), descriptor is not None
    return access(
        lambda: TCPStore(
            *head, is_master=is_master, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
        )
    )


def access(operation: Callable[[], T]) -> T:
    """Return ``operation()`` on a store; OSError if it takes too long, or the server is gone or is not a TCPStore."""
    try:
        return call_with_timeout(operation, STORE_SECONDS)  # torch itself can wait for ever
    except (RuntimeError, ValueError, MemoryError) as error:  # what torch makes of a wrong answer
        raise ConnectionError("not a TCPStore, or gone") from error
