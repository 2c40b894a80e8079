"""Composes the config with Hydra; converts between Hydra's config, `Config` and nested dicts."""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from ddp_trainer import registry
from ddp_trainer.config.differences import differences, flatten_keys
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.keys import free_keys, is_marked, known_keys
from ddp_trainer.config.schema import Config

CREDENTIALS = re.compile(r"://[^/?#\s]+@")
"""User and password in a URL; the password may have the character @."""
INTERPOLATION = re.compile(r"(\\*)\$\{")
"""What OmegaConf would replace, with the backslashes before it, which escape it."""


def config_dir() -> Path:
    """Return the folder ``conf``: in the installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


@cache
def without_choices() -> DictConfig:
    """Return the defaults of the config, in which the sections of all groups are left out."""
    config = OmegaConf.structured(Config)
    for name, group in registry.GROUPS.items():
        config[name] = {} if group.several else MISSING  # filled in by the choice
    return config


def register_configs() -> None:
    """Register with Hydra the root schema, the schemas of all choices, and the default choices."""
    store = ConfigStore.instance()
    schema = without_choices().copy()
    config = Config()
    defaults: list[Any] = ["schema"]
    for name, group in registry.GROUPS.items():
        chosen = getattr(config, name)
        defaults.append({name: list(chosen) if group.several else chosen.name})
        for choice in registry.choices(name).values():
            key = group.key(choice.name)
            store.store(group=name, name=choice.name, node=choice.schema, package=key)
    store.store(name="schema", node=schema)
    store.store(name="defaults", node={"defaults": [*defaults, "_self_"]})


def to_config(composed: DictConfig) -> Config:
    """Return a checked `Config` with the values of `composed`; raises as `from_builtins` does."""
    tree: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return from_builtins(tree)


def job_dir(output_dir: str, name: str) -> Path:
    """Return the run directory, <output_dir>/<name>, the same on every rank and after a restart.

    In a sweep (``--multirun``) the run directory is a subfolder of that folder. Its name is the
    list of the job's overrides, without keys that are FREE and have one value in the sweep.
    """
    run_dir = Path(output_dir).expanduser() / name
    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN:
        return run_dir
    known = known_keys()
    varied = varied_keys()
    keys = {override: override.partition("=")[0].lstrip("+") for override in hydra.overrides.task}
    named = [
        override
        for override, key in keys.items()
        if key in varied or not is_marked(key, "unnamed", known)
    ]
    job = ",".join(sorted(named))
    if "/" in job or len(job.encode()) > 200:  # file systems allow 255 bytes
        digest = hashlib.sha256(job.encode()).hexdigest()[:12]
        begin = job.replace("/", "_").encode()[:150].decode(errors="ignore")
        job = f"{begin}-{digest}"
    return run_dir / job


def varied_keys() -> set[str]:
    """Return the keys to which this sweep gives several values, except name and output_dir."""
    words = [word for word in sys.argv[1:] if re.match(r"[+~]?[\w./@]+=", word)]
    overrides = OverridesParser.create().parse_overrides(words)
    swept = {override.key_or_group for override in overrides if override.is_sweep_override()}
    return (swept | {*(HydraConfig.get().sweeper.get("params") or {})}) - {"name", "output_dir"}


def to_builtins(config: Any) -> Any:
    """Return a config object, or the defaults of a schema, as plain values (enums by name)."""
    match config:
        case type():
            return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
        case Enum():
            return config.name
        case dict():
            return {str(key): to_builtins(value) for key, value in config.items()}
        case list() | tuple():
            return [to_builtins(value) for value in config]
        case Path():
            return str(config)
        case _ if hasattr(config, "tolist"):  # numbers of numpy or torch
            return config.tolist()
    if is_dataclass(config):
        return {item.name: to_builtins(getattr(config, item.name)) for item in fields(config)}
    return config


def to_saved(config: Any) -> dict[str, Any]:
    """Return a config as `to_builtins` does, for files: without the passwords in URLs."""
    return map_text(lambda text: CREDENTIALS.sub("://***@", text), to_builtins(config))


def escaped(text: str) -> str:
    """Return `text` as OmegaConf needs it, so that ``${`` is text, which may not be well formed."""
    return INTERPOLATION.sub(r"\1\1\\${", text)


def map_text(change: Callable[[str], str], value: Any) -> Any:
    """Return `value`, nested dicts and lists, with ``change(text)`` in place of each text."""
    if isinstance(value, dict):  # YAML reads a class named 3 as a number
        return {str(key): map_text(change, item) for key, item in value.items()}
    if isinstance(value, list):
        return [map_text(change, item) for item in value]
    return change(value) if isinstance(value, str) else value


def from_builtins(tree: dict[str, Any]) -> Config:
    """Return a `Config` with the values of `tree`, nested dicts as `to_builtins` returns them.

    A text such as ``${oc.env:TOKEN}`` stays as it is, because `tree` may be from a file of somebody
    else.

    Raises:
        ConfigError: a value breaks a rule, or the plug-in of a choice, such as a model, is missing.
        OmegaConfBaseException: a key is unknown, or a value has the wrong type.
    """
    config = without_choices().copy()
    for name, group in registry.GROUPS.items():
        for key, section in group.sections(tree[name]).items():
            choice = registry.choices(name).get(section.get("name"))
            if choice is None:
                raise ConfigError(
                    f"{key}.name={section.get('name')} is unknown here: install its plug-in, or"
                    " import the .py file that registers it"
                )
            OmegaConf.update(config, key, OmegaConf.structured(choice.schema), merge=False)
    result = OmegaConf.to_object(OmegaConf.merge(config, map_text(escaped, tree)))
    assert isinstance(result, Config)
    return result


def config_digest(config: Any) -> str:
    """Return a hash that is equal on two ranks if and only if their configs are equal."""
    return hashlib.sha256(json.dumps(to_builtins(config), sort_keys=True).encode()).hexdigest()


def training_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return ``"key: old → new"`` for each key whose value differs, except for `free_keys`.

    A change from one strategy that averages gradients to another is none.
    """
    free = free_keys(old) | free_keys(new)
    if all(averages_gradients(tree["sync"]) for tree in (old, new)):
        old, new = (tree | {"sync": None} for tree in (old, new))
    return differences(flatten_keys(old), flatten_keys(new), ignore=free)


def averages_gradients(sync: dict[str, Any]) -> bool:
    """Return whether a strategy takes the mean over ranks of gradients as they are."""
    choice = registry.choices("sync").get(sync["name"])
    is_changed = sync.get("comm_hook", "none") != "none" or sync.get("batch_norm") == "sync"
    return choice is not None and choice.schema.averages_gradients and not is_changed


def changed_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, by dotted key, of a flat config that are not defaults of the chosen parts.

    Keys that do not name the jobs of a sweep, such as ``name``, are left out. So are keys with the
    default ``auto`` that do not change the training, because `config` has what ``auto`` has chosen.
    """
    defaults = flatten_keys(to_builtins(Config))
    for name, group in registry.GROUPS.items():
        for choice in registry.choices(name).values():
            key = group.key(choice.name)
            if config.get(f"{key}.name") == choice.name:
                values = flatten_keys(to_builtins(choice.schema), f"{key}.")
                defaults |= values | {f"{key}.name": defaults.get(f"{key}.name")}
    known = known_keys()
    return {
        key: value
        for key, value in config.items()
        if defaults.get(key) != value
        and not is_marked(key, "free" if defaults.get(key) == "auto" else "unnamed", known)
    }
