"""The check, before torchrun starts, that the nodes of a job can start together.

The head (node 0) holds a TCPStore at the port where torchrun's store will listen, and the other nodes exchange signed
messages with it there. The key is the secret that the nodes share; without one it is derived from their config, of
which only keys and digests travel.
"""

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any

from ddp_trainer.config.errors import ConfigError, TransientError

SECRET, RDZV_ID = "DDP_TRAINER_JOB_SECRET", "rdzv_id"


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

    @property
    def is_elastic(self) -> bool:
        """Return whether nodes may come and go."""
        return self.min_nodes < self.max_nodes

    def named(self, error: ConfigError | TransientError) -> ConfigError | TransientError:
        """Return `error` with the name of this node."""
        return type(error)(f"node {self.node_rank} ({self.address}): {error}")

    def port_taken(self, program: str) -> PortTakenError:
        """Return the error that `program` has the head's port."""
        return PortTakenError(
            f"port {self.head[1]} is taken on the head {self.head[0]} by {program} (ss -ltnp there names it): end it, "
            "or choose another port on all nodes"
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
        keys = [key for key in own if own[key] != head.get(key)]
        if version := next((key for key in keys if key in self.versions), None):
            text = f"{version} is {own[version]} here and {head.get(version)} on the head"
        else:  # the secret is part of all digests
            text = f"other settings than on the head ({', '.join([SECRET] if SECRET in keys else keys[:8])})"
        if keys:
            raise ConfigError(f"{text}: use the same on all nodes")

    def _digest(self, value: Any) -> bytes:
        return hmac.digest(self.config[SECRET].encode(), json.dumps(value, sort_keys=True).encode(), "sha256")
