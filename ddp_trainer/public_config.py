"""`Config` for scripts and notebooks: it takes what the command line takes, by the same rules."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Self

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from ddp_trainer import registry
from ddp_trainer.config import schema
from ddp_trainer.config.composition import (
    config_dir,
    from_builtins,
    register_configs,
    to_builtins,
    to_config,
    to_saved,
)
from ddp_trainer.config.differences import flatten_keys
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.config.keys import known_keys
from ddp_trainer.config.messages import (
    check_overrides,
    check_value,
    format_config_error,
    quote_texts,
)
from ddp_trainer.config.plugins import load_plugins
from ddp_trainer.distributed.environment import plugin_modules


class Config(schema.Config):
    """The config of one training run; the keys of the command line are the keyword arguments.

    A group such as `model` takes the name of a choice, a mapping of its keys, or an object of a
    schema: ``model="lenet"``, ``model={"name": "lenet", "init": "d2l"}``, ``model=LeNetConfig()``.
    `metric`, `logger` and `observer` take a list of names, or a mapping from names to their keys.

    Raises:
        ConfigError: a key is unknown, or a value is of a wrong type or breaks a rule.
    """

    __slots__ = ()

    def __init__(self, **values: Any) -> None:
        values |= {key: by_name(values[key]) for key in registry.LIST_GROUPS if key in values}
        plain = flatten_keys(to_builtins(values))
        words = {key: f"{key}={in_yaml(value)}" for key, value in plain.items()}
        known = known_keys()
        for key in values:
            require(
                "." not in key and key != "experiment",
                f'{key} is a key of the command line: write Config.compose("{key}=…")',
            )
        with config_errors(words.values()):
            for key, text in words.items():
                check_value(key, plain[key], text, known)
            config = from_builtins(tree_of(values))
        for item in fields(config):
            setattr(self, item.name, getattr(config, item.name))

    @classmethod
    def compose(cls, *words: str) -> Self:
        """Return the config that the command line composes from `words`, such as ``model=lenet``.

        Raises:
            ConfigError: as the constructor.
        """
        fix = "Config.compose takes texts: Config.compose('model=lenet', 'epochs=5')"
        require(all(isinstance(word, str) for word in words), fix)
        load_plugins(plugin_modules())
        register_configs()
        with config_errors(words):
            overrides = quote_texts(words)
            check_overrides(overrides)
            with initialize_config_dir(str(config_dir()), version_base="1.3"):
                return cls(**to_builtins(to_config(compose("config", overrides))))

    def __repr__(self) -> str:
        """Return a call that makes this config, with the values that are not defaults."""
        default = schema.Config(name=f"{self.data.name}-{self.model.name}-{self.sync.name}")
        values = changes(arguments(self), arguments(default))
        return f"Config({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def checked_copy(config: Any) -> schema.Config:
    """Return a checked copy of `config`, whose attributes may have changed since it was made.

    A config of the command line is returned as it is.

    Raises:
        ConfigError: as `Config`, or `config` is an object of another class.
    """
    if type(config) is schema.Config:
        return config
    require(
        isinstance(config, Config),
        f"the config is of type {type(config).__name__} and must be a Config: write"
        " Config(epochs=5), for example",
    )
    return Config(**{item.name: getattr(config, item.name) for item in fields(config)})


@contextmanager
def config_errors(words: Iterable[str]) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a ConfigError, which quotes one of `words`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(format_config_error(error, [*words])) from None


def in_yaml(value: Any) -> str:
    """Return a plain value as text, as in a setting of the command line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def by_name(value: Any) -> Any:
    """Return a choice, or a list of choices, as a dict by name, and any other value unchanged."""
    is_one = isinstance(value, str | Mapping) or not isinstance(value, Iterable)
    parts: list[Any] = [value] if is_one else [*value]
    if not all(isinstance(part, str) or is_dataclass(part) for part in parts):
        return value
    names = [getattr(part, "name", part) for part in parts]
    require(
        len(parts) == len({*names}), f"{names} has a name twice: use a mapping with other names"
    )
    sections = [part if is_dataclass(part) else {} for part in parts]
    return dict(zip(names, sections, strict=True))


def tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `Config` as nested dicts; groups that are not given get defaults."""
    defaults = schema.Config()
    tree = to_builtins(dict(values))
    for name, group in registry.GROUPS.items():
        default = getattr(defaults, name)
        value = values.get(name, default)
        if group.several:
            tree[name] = {key: section(group.key(key), part, key) for key, part in value.items()}
        else:
            tree[name] = section(name, value, default.name)
    return tree


def section(key: str, value: Any, default: str) -> dict[str, Any]:
    """Return a choice as nested dicts.

    key: its config key. value: its name, a mapping of its keys, or an object of its schema.
    default: the name if a mapping has none.
    """
    group = key.partition(".")[0]
    if isinstance(value, type):
        raise ConfigError(f"{key}={value.__name__} is a class: write {value.__name__}()")
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        require(
            registry.find(group, type(value)) is not None,
            f"{key} is of class {type(value).__name__}: write a name, a dict, or an object of a"
            f" class that register_{'dataset' if group == 'data' else group} has registered",
        )
    tree = {"name": default, **to_builtins(value)}
    if tree["name"] not in registry.choices(group):
        load_plugins(plugin_modules())
    if tree["name"] not in registry.choices(group):
        raise MissingConfigException("", f"{group}/{tree['name']}")
    return tree


def arguments(config: schema.Config) -> dict[str, Any]:
    """Return arguments that make `config`, without default values in groups; passwords are ***."""
    values = to_saved(config)
    for group in registry.GROUPS.values():
        parts = {}
        for key, part in group.sections(getattr(config, group.name)).items():
            name = key.partition(".")[2]  # "" if the group has one choice
            parts[name] = changes(to_saved(part), to_builtins(type(part)) | {"name": name})
        if group.several:
            values[group.name] = parts if any(parts.values()) else list(parts)
        else:
            values[group.name] = parts[""]["name"] if len(parts[""]) == 1 else parts[""]
    return values


def changes(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `tree` that differs from `defaults`; both are nested dicts."""
    return {
        key: changes(value, defaults[key]) if isinstance(defaults.get(key), dict) else value
        for key, value in tree.items()
        if value != defaults.get(key)
    }
