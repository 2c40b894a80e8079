"""The messages between a node and the head: each is one line, a signature in hex and then JSON."""

import asyncio
import hmac
import json
from dataclasses import asdict, dataclass, field, fields
from ipaddress import ip_address
from typing import Any, get_args

from ddp_trainer.config.errors import FAILURE, USER_ERROR, ConfigError, TransientError, printable

StartError = ConfigError | TransientError
"""The reason why the nodes cannot start."""
MAX_TEXT = 500
LIMITS = {int: 2**16, float: 1e11}
"""The exclusive upper limit of numbers, by type."""


def is_valid(value: Any, hint: Any) -> bool:
    """Return whether a received value has the type `hint` and is within `MAX_TEXT` and `LIMITS`."""
    if hint is str:
        return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()
    if hint in LIMITS:
        return type(value) in (int, hint) and 0 <= value < LIMITS[hint]
    _, part_hint = get_args(hint)  # dict[str, …]
    return isinstance(value, dict) and all(
        is_valid(key, str) and is_valid(part, part_hint) for key, part in value.items()
    )


@dataclass(frozen=True, kw_only=True)
class Message:
    """A challenge, a report or a result; ValueError if a value is not valid."""

    rank: int
    address: str
    port: int
    """A port on which the sender listens, so that the receiver can test whether it can connect."""
    nonce: str = ""
    """A random text that the answer's signature includes, so that an old answer is not valid."""
    time: float = 0
    settings: dict[str, str] = field(default_factory=dict)
    error: str = ""
    """In a report the node's error, in a result the job's error, as `encode_error` returns it."""
    speeds: dict[str, float] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        if not all(is_valid(getattr(self, item.name), item.type) for item in fields(self)):
            raise ValueError("not a message of a node")
        ip_address(self.address)

    def encode(self, key: bytes, nonce: str = "") -> bytes:
        """Return the line to send. nonce: the nonce of the message that this message answers."""
        body = json.dumps(asdict(self)).encode()
        return hmac.digest(key, nonce.encode() + body, "sha256").hex().encode() + body + b"\n"


async def receive(
    reader: asyncio.StreamReader, key: bytes, nonce: str, seconds: float
) -> tuple[Message, bool]:
    """Return the next message, and whether its signature is valid.

    nonce: the nonce of the message that it answers. seconds: the time limit.

    Raises:
        OSError, ValueError: no message came in time, or the line is not a message.
    """
    async with asyncio.timeout(seconds):
        line = await reader.readline()
    try:
        message = Message(**json.loads(line[64:]))
    except (TypeError, RecursionError) as error:
        raise ValueError("not a message of a node") from error
    return message, hmac.compare_digest(line, message.encode(key, nonce))


def encode_error(error: StartError | None) -> str:
    """Return an error as one line of exit code and message, such as ``2 node 1 …``; "" for None."""
    if error is None:
        return ""
    code = USER_ERROR if isinstance(error, ConfigError) else FAILURE
    return f"{code} {printable(str(error))}"[:MAX_TEXT]


def decode_error(text: str) -> StartError | None:
    """Return the error that `encode_error` has encoded as `text`; None for ""."""
    if not text:
        return None
    code, _, message = text.partition(" ")
    return ConfigError(message) if code == str(USER_ERROR) else TransientError(message)
