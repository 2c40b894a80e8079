"""Composes a validated `Config` from command-line overrides with Hydra; converts a `Config` to builtins and back."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError

from ddp_trainer import registry
from ddp_trainer.config.errors import FREE, flatten_keys, require
from ddp_trainer.config.messages import check_overrides
from ddp_trainer.config.schema import Config


def config_dir() -> Path:
    """Return the folder of the YAML files: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"conf/config.yaml is neither in {package} nor beside it: reinstall ddp_trainer")


def register_configs() -> None:
    """Register the schema of every choice with Hydra, and the root with its default choices."""
    store = ConfigStore.instance()
    for group in registry.groups():
        for name, choice in registry.choices(group).items():
            package = f"logger.{name}" if group == "logger" else None
            store.store(group=group, name=name, node=choice.schema, package=package)
    schema = OmegaConf.structured(Config)
    for group in registry.groups():  # the choices fill them in
        schema[group] = {} if group == "logger" else MISSING
    store.store(name="schema", node=schema)
    defaults = [{group: default_choice(group)} for group in registry.groups()]
    store.store(name="defaults", node={"defaults": ["schema", *defaults, "_self_"]})


def default_choice(group: str) -> str | list[str]:
    """Return the choice of `group` that `Config` has by default; of loggers, several."""
    factory = Config.__dataclass_fields__[group].default_factory
    assert factory is not NO_DEFAULT
    default = factory()
    return list(default) if isinstance(default, dict) else default.name


def compose(overrides: Sequence[str]) -> Config:
    """Return the config composed from the command line's `overrides`.

    Raises:
        ConfigError, OmegaConfBaseException, HydraException: they cannot be composed; `format_config_error` says why.
    """
    check_overrides(overrides)
    register_configs()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return to_config(hydra_compose("config", list(overrides)))


def to_config(composed: DictConfig) -> Config:
    """Return what Hydra composed as a validated `Config`.

    Raises:
        ConfigError: a value breaks a rule.
        OmegaConfBaseException: a key was added or removed, or a value is missing or refers to nothing.
    """
    check_keys(composed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config


def check_keys(node: DictConfig, prefix: str = "") -> None:
    """Refuse what Hydra accepts: keys added with ``+`` that no schema has, and keys removed with ``~``.

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


def job_dir(output_dir: str, name: str) -> Path:
    """Return the run directory: a function of the config alone, the same on every rank and after a restart.

    In a sweep it is named after the overrides that Hydra is running.
    """
    run_dir = Path(output_dir).expanduser() / name
    settings = HydraConfig.get()
    if settings.mode is RunMode.MULTIRUN:
        return run_dir / shorten(settings.job.override_dirname)
    return run_dir


def shorten(name: str) -> str:
    """Return `name`; if it is too long for a file system (255 bytes), its beginning and a hash."""
    if len(name.encode()) <= 200:
        return name
    return f"{name[:150]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def to_builtins(config: Any) -> dict[str, Any]:
    """Return a config object as nested dicts, lists, strings and numbers (enums by name)."""

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
    for group in registry.groups():
        chosen = [(group, tree[group])]
        if group == "logger":
            schema[group] = {}
            chosen = [(f"logger.{name}", subtree) for name, subtree in tree[group].items()]
        for key, subtree in chosen:
            choice = registry.choices(group).get(subtree["name"])
            require(choice is not None, f"{group}={subtree['name']} is unknown here: is its plug-in installed?")
            assert choice is not None
            OmegaConf.update(schema, key, OmegaConf.structured(choice.schema), merge=False)
    return to_config(OmegaConf.merge(schema, tree))  # type: ignore[arg-type]


def config_digest(config: Any) -> str:
    """Return a hash that is equal on two ranks exactly when their configs are."""
    return hashlib.sha256(json.dumps(to_builtins(config), sort_keys=True).encode()).hexdigest()


# How long, how often, where and on how many ranks: free to change when a run is resumed. Fields of a group's choices
# say so in their metadata.
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
        "logger",
        "compile",
        "deterministic",
        "channels_last",
    ]
)


def training_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the keys that differ between two configs and change the training, as ``key: old → new``."""
    before, after = flatten_keys(old), flatten_keys(new)
    free = FREE_KEYS | free_keys(old) | free_keys(new)
    return [
        f"{key}: {before.get(key, 'absent')} → {after.get(key, 'absent')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in free and key.split(".")[0] not in free
    ]


def free_keys(tree: dict[str, Any]) -> set[str]:
    """Return the keys of the choices in a config (as builtins) that a resumed run may change."""
    keys = set()
    for group in registry.groups():
        if choice := registry.choices(group).get(tree.get(group, {}).get("name")):
            keys |= {f"{group}.{field.name}" for field in fields(choice.schema) if field.metadata.get(FREE)}
    return keys
