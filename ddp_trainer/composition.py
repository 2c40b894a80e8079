"""What Hydra composed, as a validated `Config` and back as plain data; which changes make it another training."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError

from ddp_trainer.config import SCHEMAS, Config, flatten, require


def resolve(composed: DictConfig) -> Config:
    """Turn what Hydra composed into a validated `Config`.

    Raises:
        ConfigError: a value breaks a rule.
        OmegaConfBaseException: a key was added or removed, or a value is missing or refers to nothing.
    """
    check_keys(composed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config


def check_keys(node: DictConfig, prefix: str = "") -> None:
    """Refuse what Hydra lets pass: keys added with ``+`` that no schema has, and keys removed with ``~``.

    Raises:
        ConfigKeyError: a key was added.
        ConfigError: a key was removed.
    """
    schema = OmegaConf.get_type(node)
    names = [f.name for f in fields(schema)] if is_dataclass(schema) else list(node)
    present = list(node.keys())  # "in node" is false for a key that is there and has no value yet
    for key in present:
        if key not in names:
            error = ConfigKeyError(f"Key '{key}' not in '{schema}'")
            error.full_key, error.object_type = f"{prefix}{key}", schema
            raise error
    for name in names:
        require(name in present, f"~{prefix}{name} removes a key that is needed: set it instead, {prefix}{name}=…")
        if isinstance(child := node._get_node(name), DictConfig) and not child._is_missing():
            check_keys(child, f"{prefix}{name}.")


def to_builtins(config: Config) -> dict[str, Any]:
    """Return `config` as nested dicts, lists, strings and numbers (enums by name)."""

    def plain(value: Any) -> Any:
        match value:
            case Enum():
                return value.name
            case dict():
                return {key: plain(item) for key, item in value.items()}
            case list():
                return [plain(item) for item in value]
            case _:
                return value

    return plain(asdict(config))


def from_builtins(tree: dict[str, Any]) -> Config:
    """Return the `Config` of which `to_builtins` made `tree`.

    Raises:
        ConfigError: a value breaks a rule.
        OmegaConfBaseException: a key is unknown, or a value is of another type.
    """
    schema = OmegaConf.structured(Config)
    for group, choices in SCHEMAS.items():
        require(tree[group]["name"] in choices, f"{group}={tree[group]['name']} is unknown to this version")
        schema[group] = OmegaConf.structured(choices[tree[group]["name"]])
    return resolve(OmegaConf.merge(schema, tree))  # type: ignore[arg-type]


def digest(config: Config) -> str:
    """Return a hash that is equal on two ranks exactly when their configs are."""
    return hashlib.sha256(json.dumps(to_builtins(config), sort_keys=True).encode()).hexdigest()


# How long, how often, where and on how many ranks: free to change when a run is resumed.
FREE_KEYS = frozenset(
    [
        "name",
        "output_dir",
        "epochs",
        "max_steps",
        "eval_batch_size",
        "num_threads",
        "device",
        "backend",
        "timeout_seconds",
        "log_every_steps",
        "resume",
        "checkpoint",
        "data.root",
        "sync.bucket_cap_mb",
        "compile",
        "deterministic",
        "channels_last",
    ]
)


def training_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Name the keys in which two configs (as builtins) train differently, as ``key: old → new``."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {before.get(key, 'absent')} → {after.get(key, 'absent')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in FREE_KEYS and key.split(".")[0] not in FREE_KEYS
    ]
