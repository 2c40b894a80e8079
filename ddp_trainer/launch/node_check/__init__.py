"""The check, before torchrun starts, that the nodes of a job can start together.

The head (node 0) listens at the port where torchrun's store will listen. On each connection it sends a challenge; a
node answers with a report and waits for the result. The key that signs them is derived from the secret that the nodes
share; without one it is derived from their config, of which only keys and digests travel.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from ipaddress import ip_address
from statistics import median
from typing import Any

from ddp_trainer.config.errors import ConfigError, TransientError

SECRET, RDZV_ID = "DDP_TRAINER_JOB_SECRET", "rdzv_id"
MAX_TEXT = 500
IS_VALID: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable(),
    int: lambda value: type(value) is int and 0 <= value < 2**16,
    float: lambda value: type(value) in (int, float) and 0 <= value < 1e11,
    dict[str, float]: lambda value: (
        isinstance(value, dict) and all(map(IS_VALID[str], value)) and all(map(IS_VALID[float], value.values()))
    ),
    dict[str, str]: lambda value: isinstance(value, dict) and all(map(IS_VALID[str], [*value, *value.values()])),
}


SLOW = 0.85
"""A node is slow if it reaches less than this share of the median of the other nodes."""


class SlowNodeError(TransientError):
    """This node is slower than the other nodes of the job."""


class PortTakenError(TransientError):
    """Another program listens where the head should."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """This node, and the job to which it belongs."""

    node_rank: int
    min_nodes: int
    max_nodes: int
    head: tuple[str, int]
    """Address of node 0, and the port for torchrun's store."""
    timeout: float
    """How many seconds the nodes wait for each other."""
    address: str
    versions: dict[str, str]
    """What must be the same on all nodes and may be read by anyone: also the number of nodes."""
    config: dict[str, Any]
    """What must be the same on all nodes, by flat key: also SECRET and RDZV_ID."""
    speeds: dict[str, float] = field(default_factory=dict)
    """What check.fitness has measured here, by name; the higher the better. Empty without it."""

    def named(self, error: ConfigError | TransientError) -> ConfigError | TransientError:
        """Return `error` with the name of this node."""
        return type(error)(f"node {self.node_rank} ({self.address}): {error}")

    def port_taken(self) -> PortTakenError:
        """Return the error that another program has the head's port."""
        return PortTakenError(
            f"port {self.head[1]} is taken on the head {self.head[0]} by another program or job (ss -ltnp there names "
            "it): end it, or choose another port on all nodes"
        )

    def key(self) -> bytes:
        """Return the key of this job's messages: slowly, so that it is not found by trying configs."""
        source = self.config[RDZV_ID] if self.config[SECRET] else self.config
        return hashlib.pbkdf2_hmac("sha256", self._digest(source), b"ddp_trainer", iterations=200_000)

    def settings(self, salt: str) -> dict[str, str]:
        """Return what the head publishes: of the config, digests of 16 bits, which show differences but not values."""
        digests = {key: self._digest([salt, key, value]).hex()[:4] for key, value in self.config.items()}
        return digests | self.versions | {"salt": salt}

    def check_settings(self, head: dict[str, str]) -> None:
        """Raise ConfigError if the head's `settings` are others than those of this node."""
        own = self.settings(head.get("salt", ""))
        keys = [key for key in own | head if own.get(key) != head.get(key)]
        if version := next((key for key in keys if key in self.versions), None):
            text = f"{version} is {own[version]} here and {head.get(version)} on the head"
        else:  # the secret is part of all digests
            text = f"other settings than on the head ({', '.join([SECRET] if SECRET in keys else keys[:8])})"
        if keys:
            raise ConfigError(f"{text}: use the same on all nodes")

    def _digest(self, value: Any) -> bytes:
        return hmac.digest(self.config[SECRET].encode(), json.dumps(value, sort_keys=True).encode(), "sha256")


@dataclass(frozen=True, kw_only=True)
class Message:
    """A challenge, a report or a result; ValueError for a value that no node sends."""

    rank: int
    address: str
    port: int
    """A port that the system has chosen, as for ranks: the other side must be able to connect to it."""
    nonce: str = ""
    """A random word, which the signature of the answer covers: an answer that was recorded is not valid again."""
    time: float = 0
    settings: dict[str, str] = field(default_factory=dict)
    error: str = ""
    """The code and text of `encode_error`; empty from a node that is ready, and if all start."""
    speeds: dict[str, float] = field(default_factory=dict)
    """In a report those of the node. In a result the slow nodes, by rank, with their share of the others' speed."""

    def __post_init__(self) -> None:
        if not all(IS_VALID[item.type](getattr(self, item.name)) for item in fields(self)):
            raise ValueError("not a message of a node")
        ip_address(self.address)

    def encode(self, key: bytes, nonce: str = "") -> bytes:
        """Return the line that the other side receives: signature, then JSON."""
        body = json.dumps(asdict(self)).encode()
        return hmac.digest(key, nonce.encode() + body, "sha256").hex().encode() + body + b"\n"


async def receive(reader: asyncio.StreamReader, key: bytes, nonce: str, seconds: float) -> tuple[Message, bool]:
    """Return the next message and whether it is signed with `key`; OSError or ValueError if none comes in time."""
    async with asyncio.timeout(seconds):
        line = await reader.readline()
    try:
        message = Message(**json.loads(line[64:]))
    except (TypeError, RecursionError) as error:
        raise ValueError("not a message of a node") from error
    return message, hmac.compare_digest(line, message.encode(key, nonce))


def encode_error(error: Exception | None) -> str:
    """Return an error's exit code, and its text without control characters; empty for None."""
    text = "".join(character if character.isprintable() else " " for character in str(error))
    return f"{2 if isinstance(error, ConfigError) else 1} {text}"[:MAX_TEXT] if error else ""


def raise_error(error: str, *, is_slow: bool = False) -> None:
    """Raise what `encode_error` has encoded; on a node that `is_slow` as a SlowNodeError."""
    if error:
        raise (ConfigError if error[0] == "2" else SlowNodeError if is_slow else TransientError)(error[2:])


def find_slow(speeds: dict[int, dict[str, float]]) -> tuple[dict[str, float], str]:
    """Return the slow nodes, by rank, with the share of the median of the others that they reach, and a text on them.

    speeds: what each node has measured, by rank. Two nodes are compared with each other.
    """
    shares: dict[str, float] = {}
    texts = []
    for rank, own in speeds.items():
        for name, speed in own.items():
            others = [other[name] for other_rank, other in speeds.items() if other_rank != rank and other.get(name)]
            share = speed / median(others) if others else 1.0
            if share < min(SLOW, shares.get(str(rank), 1.0)):
                shares[str(rank)] = share
                texts.append(f"node {rank} reaches {share:.0%} of the median of the other nodes in its {name}")
    return shares, "; ".join(texts[:4]).replace("%", " %")
