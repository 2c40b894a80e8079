"""Composes a validated `Config` from command-line overrides with Hydra; converts a `Config` to builtins and back."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, fields
from enum import Enum
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

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
    """Return what Hydra composed as a validated `Config`; raises as `from_builtins` does."""
    tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return from_builtins(cast(dict[str, Any], tree))


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
    config = OmegaConf.structured(Config)
    for group in registry.groups():
        parts = (
            {f"logger.{name}": part for name, part in tree[group].items()}
            if group == "logger"
            else {group: tree[group]}
        )
        if group == "logger":
            config[group] = {}
        for key, part in parts.items():
            choice = registry.choices(group).get(part.get("name"))
            require(choice is not None, f"{key}.name={part.get('name')} is unknown here: is its plug-in installed?")
            assert choice is not None
            OmegaConf.update(config, key, OmegaConf.structured(choice.schema), merge=False)
    result = OmegaConf.to_object(OmegaConf.merge(config, tree))
    assert isinstance(result, Config)
    return result


def config_digest(config: Any) -> str:
    """Return a hash that is equal on two ranks exactly when their configs are."""
    return hashlib.sha256(json.dumps(to_builtins(config), sort_keys=True).encode()).hexdigest()


def training_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the keys that differ between two configs and change the training, as ``key: old → new``."""
    before, after, free = flatten_keys(old), flatten_keys(new), free_keys(old) | free_keys(new)
    return [
        f"{key}: {before.get(key, 'absent')} → {after.get(key, 'absent')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in free and key.split(".")[0] not in free
    ]


def free_keys(tree: dict[str, Any]) -> set[str]:
    """Return the keys, and sections, of a config (as builtins) that a resumed run may change."""
    schemas: dict[str, Any] = {"": Config}
    for group in registry.groups():
        if choice := registry.choices(group).get(tree.get(group, {}).get("name")):
            schemas[f"{group}."] = choice.schema
    return {
        f"{prefix}{f.name}"
        for prefix, schema in schemas.items()
        for f in fields(schema)
        if FREE.items() <= f.metadata.items()
    }
