"""Composes the config with Hydra; converts between Hydra's config, `Config` and nested dicts."""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from ddp_trainer import registry
from ddp_trainer.config.differences import differences
from ddp_trainer.config.errors import ConfigError, flatten_keys
from ddp_trainer.config.keys import free_keys, is_marked, known_keys
from ddp_trainer.config.schema import Config


def config_dir() -> Path:
    """Return the folder ``conf``: in the installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(
        f"conf/config.yaml is neither in {package} nor beside it: reinstall ddp_trainer"
    )


def register_configs() -> None:
    """Register with Hydra the root schema, the schemas of all choices, and the default choices."""
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    config = Config()
    defaults: list[Any] = ["schema"]
    for name, group in registry.GROUPS.items():
        schema[name] = {} if group.several else MISSING  # filled in by the choice
        chosen = getattr(config, name)
        defaults.append({name: list(chosen) if group.several else chosen.name})
        for choice in registry.choices(name).values():
            key = group.key(choice.name)
            store.store(group=name, name=choice.name, node=choice.schema, package=key)
    store.store(name="schema", node=schema)
    store.store(name="defaults", node={"defaults": [*defaults, "_self_"]})


def to_config(composed: DictConfig) -> Config:
    """Return a checked `Config` with the values of `composed`; raises as `from_builtins` does."""
    tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return from_builtins(cast(dict[str, Any], tree))


def job_dir(output_dir: str, name: str) -> Path:
    """Return the run directory, <output_dir>/<name>, the same on every rank and after a restart.

    In a sweep (``--multirun``) it is a subfolder of that folder, named after the overrides of the
    current job, except those of keys that are FREE.
    """
    run_dir = Path(output_dir).expanduser() / name
    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN:
        return run_dir
    known = known_keys()
    keys = {override: override.partition("=")[0].lstrip("+~") for override in hydra.overrides.task}
    named = [override for override, key in keys.items() if not is_marked(key, "unnamed", known)]
    job = ",".join(sorted(named))
    if len(job.encode()) > 200:  # a file system allows 255 bytes
        job = f"{job[:150]}-{hashlib.sha256(job.encode()).hexdigest()[:12]}"
    return run_dir / job


def to_builtins(config: Any) -> dict[str, Any]:
    """Return a config object as nested dicts, lists, strings and numbers (enums by name)."""
    tree: Any = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return tree


def from_builtins(tree: dict[str, Any]) -> Config:
    """Return a `Config` with the values of `tree`, nested dicts as `to_builtins` returns them.

    Raises:
        ConfigError: a value breaks a rule, or `tree` names a choice (such as a model) whose plug-in
        is not installed. OmegaConfBaseException: a key is unknown, or a value has the wrong type.
    """
    config = OmegaConf.structured(Config)
    for name, group in registry.GROUPS.items():
        if group.several:
            config[name] = {}
        for key, section in group.sections(tree[name]).items():
            choice = registry.choices(name).get(section.get("name"))
            if choice is None:
                raise ConfigError(
                    f"{key}.name={section.get('name')} is unknown here: install its plug-in"
                )
            OmegaConf.update(config, key, OmegaConf.structured(choice.schema), merge=False)
    result = OmegaConf.to_object(OmegaConf.merge(config, tree))
    assert isinstance(result, Config)
    return result


def config_digest(config: Any) -> str:
    """Return a hash that is equal on two ranks if and only if their configs are equal."""
    return hashlib.sha256(json.dumps(to_builtins(config), sort_keys=True).encode()).hexdigest()


def training_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return ``"key: old → new"`` for each key with another value that changes the training."""
    free = free_keys(old) | free_keys(new)
    before, after = (
        {key: value for key, value in flatten_keys(tree).items() if key not in free}
        for tree in (old, new)
    )
    return differences(before, after)
