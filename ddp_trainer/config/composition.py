"""Registers the choices with Hydra, and converts between Hydra's config, the dataclass `Config` and
nested dicts.
"""

import hashlib
import json
from dataclasses import asdict, fields
from enum import Enum
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from ddp_trainer import registry
from ddp_trainer.config.differences import differences
from ddp_trainer.config.errors import ConfigError, flatten_keys
from ddp_trainer.config.schema import Config


def config_dir() -> Path:
    """Return the folder ``conf`` of the YAML files: in the installed package, or beside the package
    in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(
        f"conf/config.yaml is neither in {package} nor beside it: reinstall ddp_trainer"
    )


def register_configs() -> None:
    """Register with Hydra the schema of every choice, the root schema, and the default choice of
    each group.
    """
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    for group in registry.GROUPS:
        schema[group] = {} if group == "logger" else MISSING  # the choice fills it in
        for name, choice in registry.choices(group).items():
            package = f"logger.{name}" if group == "logger" else None
            store.store(group=group, name=name, node=choice.schema, package=package)
    store.store(name="schema", node=schema)
    default = Config()
    defaults: list[Any] = [
        {group: getattr(default, group).name} for group in registry.GROUPS if group != "logger"
    ]
    store.store(
        name="defaults",
        node={"defaults": ["schema", *defaults, {"logger": list(default.logger)}, "_self_"]},
    )


def to_config(composed: DictConfig) -> Config:
    """Return a checked `Config` with the values of `composed`; raise the same errors as
    `from_builtins`.
    """
    tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return from_builtins(cast(dict[str, Any], tree))


def parse_setting(word: str) -> DictConfig:
    """Return `word`, ``key=value``, as a config, its value parsed as YAML; ConfigError if the value
    is not YAML.
    """
    try:
        return OmegaConf.from_dotlist([word])
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{word} cannot be read: the value must be YAML, so quote special characters"
        ) from error


def job_dir(output_dir: str, name: str) -> Path:
    """Return the run directory, <output_dir>/<name>, which is the same on every rank and after a
    restart.

    In a sweep (``--multirun``) it is a subfolder of that folder, named after the overrides of the
    current job.
    """
    run_dir = Path(output_dir).expanduser() / name
    settings = HydraConfig.get()
    if settings.mode is not RunMode.MULTIRUN:
        return run_dir
    job = settings.job.override_dirname
    if len(job.encode()) > 200:  # a file system allows 255 bytes
        job = f"{job[:150]}-{hashlib.sha256(job.encode()).hexdigest()[:12]}"
    return run_dir / job


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
    """Return a `Config` with the values of `tree`, nested dicts as `to_builtins` returns them.

    Raises:
        ConfigError: a value breaks a rule, or `tree` names a choice (such as a model) whose plug-in
        is not installed. OmegaConfBaseException: a key is unknown, or a value has the wrong type.
    """
    config = OmegaConf.structured(Config)
    config.logger = {}
    sections = {group: tree[group] for group in registry.GROUPS if group != "logger"}
    sections |= {f"logger.{name}": section for name, section in tree["logger"].items()}
    for key, section in sections.items():
        choice = registry.choices(key.partition(".")[0]).get(section.get("name"))
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
    """Return ``"key: old → new"`` for each key that changes the training and has another value in
    `new`.
    """
    free = free_keys(old) | free_keys(new)
    before, after = (
        {key: value for key, value in flatten_keys(tree).items() if key not in free}
        for tree in (old, new)
    )
    return differences(before, after)


def free_keys(tree: dict[str, Any]) -> set[str]:
    """Return the dotted keys of the config `tree` that a resumed run may change."""
    schemas: dict[str, Any] = {"": Config}
    for group in registry.GROUPS:
        if choice := registry.choices(group).get(tree.get(group, {}).get("name")):
            schemas[f"{group}."] = choice.schema
    free = {
        prefix + f.name
        for prefix, schema in schemas.items()
        for f in fields(schema)
        if f.metadata.get("free")
    }
    return {key for key in flatten_keys(tree) if key in free or key.split(".")[0] in free}
