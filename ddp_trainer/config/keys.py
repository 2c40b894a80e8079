"""The keys of the config: their types and metadata, and the parser for ``key=value``."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import reduce
from itertools import accumulate
from operator import getitem
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf

from ddp_trainer import registry
from ddp_trainer.config.differences import flatten_keys
from ddp_trainer.config.errors import ConfigError, require, suggestion
from ddp_trainer.config.schema import Config

Keys = dict[str, tuple[Any, Mapping[str, Any]]]
"""The type and the metadata of config fields, by dotted key."""


def keys_of(schemas: Iterable[tuple[str, type]]) -> Keys:
    """Return the keys of dataclasses and of dataclasses in them. schemas: (prefix, class) pairs."""
    keys: Keys = {}
    for section, schema in schemas:
        hints = get_type_hints(schema)
        for field in fields(schema):
            key = f"{section}.{field.name}".lstrip(".")
            hint = hints[field.name]
            keys[key] = (hint, field.metadata)
            if is_dataclass(hint):
                keys |= keys_of([(key, hint)])  # type: ignore[list-item]
    return keys


def known_keys() -> Keys:
    """Return the keys of the config with all choices of all groups."""
    choices = [
        (group.key(choice.name), choice.schema)
        for group in registry.GROUPS.values()
        for choice in registry.choices(group.name).values()
    ]
    return keys_of([("", Config), *choices])


def free_keys(tree: dict[str, Any]) -> set[str]:
    """Return the dotted keys of the config `tree` that a resumed run may change."""
    schemas: list[tuple[str, type]] = [("", Config)]
    for group in registry.GROUPS.values():
        for key, section in group.sections(tree.get(group.name, {})).items():
            if choice := registry.choices(group.name).get(section.get("name")):
                schemas.append((key, choice.schema))
    keys = keys_of(schemas)
    return {key for key in flatten_keys(tree) if is_marked(key, "free", keys)}


def naming_keys(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys by which to name runs: those of all `configs` whose values differ.

    Keys that do not name the jobs of a sweep, such as ``device`` and ``report``, are left out,
    because they do not change the training. configs: flat configs, by dotted key.
    """
    known = known_keys()
    return [
        key
        for key, value in (configs[0] if configs else {}).items()
        if not is_marked(key, "unnamed", known)
        and all(key in config for config in configs)
        and any(config[key] != value for config in configs)
    ]


def is_marked(key: str, mark: str, keys: Keys) -> bool:
    """Return whether the metadata of `key`, or of a section that contains `key`, has `mark`."""
    sections = accumulate(key.split("."), "{}.{}".format)
    return any(section in keys and keys[section][1].get(mark) for section in sections)


def parse_value(word: str, hint: Any) -> Any:
    """Return the value in `word`, ``key=value``: unchanged if `hint` is str, else parsed as YAML.

    hint: the type of the key. ConfigError if the value is not YAML.
    """
    key, _, text = word.partition("=")
    if hint is str or (hint == str | None and text != "null"):
        return text
    try:
        return OmegaConf.select(OmegaConf.from_dotlist([word]), key, throw_on_missing=True)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{word} cannot be read: the value must be YAML, so quote special characters"
        ) from error


def change_keys(tree: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `tree`, a config as nested dicts, changed by `words`, ``key=value``.

    ConfigError if a word has no =, its key is unknown or a whole section, or its value is not YAML.
    """
    known = known_keys()
    present = flatten_keys(tree)
    changed = deepcopy(tree)
    for word in words:
        key, equals, _ = word.partition("=")
        require(bool(equals), f"{word} is not an option: write key=value")
        is_section = any(other.startswith(f"{key}.") for other in known)
        require(not is_section, f"{word} would replace a whole section: set the keys in it")
        fix = suggestion(key, present) or ": the config of the run has no such key"
        require(key in present, f"{word} is unknown{fix}")
        hint, _ = known.get(key, (Any, None))
        *path, name = key.split(".")
        reduce(getitem, path, changed)[name] = parse_value(word, hint)
    return changed
