"""The keys of the config: their types and metadata, and the parser for ``key=value``."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf

from ddp_trainer import registry
from ddp_trainer.config.errors import ConfigError, flatten_keys, require, suggestion
from ddp_trainer.config.schema import Config

Keys = dict[str, tuple[Any, Mapping[str, Any]]]
"""The type and the metadata of config fields, by dotted key."""


def keys_of(schemas: Iterable[tuple[str, type]]) -> Keys:
    """Return the keys of dataclasses and of their sections. schemas: pairs of key and dataclass."""
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


def is_marked(key: str, mark: str, keys: Keys) -> bool:
    """Return whether the metadata of `key`, or of a section that it is in, has `mark`."""
    sections = accumulate(key.split("."), "{}.{}".format)
    return any(section in keys and keys[section][1].get(mark) for section in sections)


def parse_value(word: str, hint: Any) -> Any:
    """Return the value of `word`, ``key=value``: as text if `hint` is text, else parsed as YAML.

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
    """Return the config `tree`, nested dicts, with the values of `words`, ``key=value``.

    ConfigError if a word is not a setting, its key is unknown, or it replaces a whole section.
    """
    known = known_keys()
    present = flatten_keys(tree)
    changed = OmegaConf.create(tree)
    for word in words:
        key, equals, _ = word.partition("=")
        require(bool(equals), f"{word} is not an option: write key=value")
        is_section = any(other.startswith(f"{key}.") for other in known)
        require(not is_section, f"{word} would replace a whole section: set the keys in it")
        hint = suggestion(key, present) or ": the config of the run has no such key"
        require(key in present, f"{word} is unknown{hint}")
        type_hint, _ = known.get(key, (Any, None))
        OmegaConf.update(changed, key, parse_value(word, type_hint))
    result: Any = OmegaConf.to_container(changed)
    return result
