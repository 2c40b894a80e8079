"""The check, before torchrun starts, that the nodes of a job can start together.

The head (node 0) listens at the port where torchrun's store will listen. On each connection it
sends a challenge; a node answers with a report and waits for the result. Messages are signed with a
key that is derived from the secret that all nodes have; if there is no secret, from the config. The
values in the config are not sent, only digests of them.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from statistics import median
from typing import Any

from ddp_trainer.config.differences import differing_keys
from ddp_trainer.config.errors import ConfigError, TransientError

SECRET = "DDP_TRAINER_JOB_SECRET"
RDZV_ID = "rdzv_id"
MAX_TEXT = 500
IS_VALID: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable(),
    int: lambda value: type(value) is int and 0 <= value < 2**16,
    float: lambda value: type(value) in (int, float) and 0 <= value < 1e11,
    dict[str, float]: lambda value: (
        isinstance(value, dict)
        and all(map(IS_VALID[str], value))
        and all(map(IS_VALID[float], value.values()))
    ),
    dict[str, str]: lambda value: (
        isinstance(value, dict) and all(map(IS_VALID[str], [*value, *value.values()]))
    ),
}
SLOW = 0.85
"""A node is slow if it reaches less than this share of the median of the other nodes."""


class PortTakenError(TransientError):
    """Another program listens at the head's port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """This node, and the job to which it belongs."""

    node_rank: int
    min_nodes: int
    max_nodes: int
    head: tuple[str, int]
    """Address of node 0, and the port for torchrun's store."""
    timeout: float
    """Seconds for which a node waits for the others."""
    address: str
    versions: dict[str, str]
    """Values that must be equal on all nodes and are sent as they are: versions and the number of
    nodes.
    """
    config: dict[str, Any]
    """Values that must be equal on all nodes, by key such as ``optimizer.lr``: the config, SECRET
    and RDZV_ID.
    """
    speeds: dict[str, float] = field(default_factory=dict)
    """Measured speeds of this node by name; higher is faster. Empty with check.fitness=false."""
    name: str = ""
    """The name of this node: in a SLURM job its name in SLURM, else its host name."""
    run_dir: Path = Path()
    """The run directory of the job, in which the head writes the names of slow nodes."""

    def named(self, error: ConfigError | TransientError) -> ConfigError | TransientError:
        """Return an error of the same type whose message begins with the rank and address of this
        node.
        """
        return type(error)(f"node {self.node_rank} ({self.address}): {error}")

    def port_taken(self) -> PortTakenError:
        """Return the error that says that another program uses the head's port."""
        return PortTakenError(
            f"port {self.head[1]} is taken on the head {self.head[0]} by another program or job (ss"
            " -ltnp on the head names it): end it, or choose another port on all nodes"
        )

    def key(self) -> bytes:
        """Return the key that signs messages. Deriving it is slow, so that nobody can try many
        secrets or configs.
        """
        source = self.config[RDZV_ID] if self.config[SECRET] else self.config
        return hashlib.pbkdf2_hmac(
            "sha256", self._digest(source), b"ddp_trainer", iterations=200_000
        )

    def settings(self, salt: str) -> dict[str, str]:
        """Return what the head sends to any client: versions, and a salted 16-bit digest of each
        config value.
        """
        digests = {
            key: self._digest([salt, key, value]).hex()[:4] for key, value in self.config.items()
        }
        return digests | self.versions | {"salt": salt}

    def check_settings(self, head: dict[str, str]) -> None:
        """Raise ConfigError if `head`, the result of `settings` on the head, differs from the
        settings of this node.
        """
        own = self.settings(head.get("salt", ""))
        keys = differing_keys(own, head)
        if version := next((key for key in keys if key in self.versions), None):
            text = f"{version} is {own[version]} here and {head.get(version)} on the head"
        else:  # a different secret changes all digests
            text = (
                "other settings than on the head"
                f" ({', '.join([SECRET] if SECRET in keys else keys[:8])})"
            )
        if keys:
            raise ConfigError(f"{text}: use the same on all nodes")

    def _digest(self, value: Any) -> bytes:
        return hmac.digest(
            self.config[SECRET].encode(), json.dumps(value, sort_keys=True).encode(), "sha256"
        )


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message between a node and the head: a challenge, a report or a result. ValueError if a
    value is not valid.
    """

    rank: int
    address: str
    port: int
    """A port on which the sender listens, chosen by the system; the receiver tests that it can
    connect to it.
    """
    nonce: str = ""
    """A random text, which the answer's signature includes, so that an answer recorded earlier is
    not valid.
    """
    time: float = 0
    settings: dict[str, str] = field(default_factory=dict)
    error: str = ""
    """The result of `encode_error`: in a report the node's error, in a result that of the job;
    empty: no error.
    """
    speeds: dict[str, float] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        if not all(IS_VALID[item.type](getattr(self, item.name)) for item in fields(self)):
            raise ValueError("not a message of a node")
        ip_address(self.address)

    def encode(self, key: bytes, nonce: str = "") -> bytes:
        """Return the line to send: signature in hex, then JSON. nonce: that of the message which
        this one answers.
        """
        body = json.dumps(asdict(self)).encode()
        return hmac.digest(key, nonce.encode() + body, "sha256").hex().encode() + body + b"\n"


async def receive(
    reader: asyncio.StreamReader, key: bytes, nonce: str, seconds: float
) -> tuple[Message, bool]:
    """Return the next message, and whether it is signed with `key`; OSError or ValueError if no
    valid message comes.
    """
    async with asyncio.timeout(seconds):
        line = await reader.readline()
    try:
        message = Message(**json.loads(line[64:]))
    except (TypeError, RecursionError) as error:
        raise ValueError("not a message of a node") from error
    return message, hmac.compare_digest(line, message.encode(key, nonce))


def encode_error(error: Exception | None) -> str:
    """Return exit code and message of an error as one line, such as ``2 node 1 …``; an empty text
    for None.
    """
    text = "".join(character if character.isprintable() else " " for character in str(error))
    return f"{2 if isinstance(error, ConfigError) else 1} {text}"[:MAX_TEXT] if error else ""


def raise_error(error: str) -> None:
    """Raise the ConfigError or TransientError that `encode_error` has made into text; do nothing
    for an empty text.
    """
    if error:
        raise (ConfigError if error[0] == "2" else TransientError)(error[2:])


def find_slow(speeds: dict[int, dict[str, float]]) -> dict[int, str]:
    """Return by node rank a text about each slow node: which speed is furthest below the median of
    the other nodes.
    """
    slow = {}
    for rank, own in speeds.items():
        least = SLOW
        for name, speed in own.items():
            others = [
                other[name]
                for other_rank, other in speeds.items()
                if other_rank != rank and other.get(name)
            ]
            if others and (share := speed / median(others)) < least:
                least = share
                slow[rank] = (
                    f"node {rank} reaches {100 * share:.0f} % of the median of the other nodes in"
                    f" its {name}"
                )
    return slow
