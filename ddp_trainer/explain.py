"""What is wrong with the user's input, in one line: the key and value, the rule, the way out.

Our own errors come worded; what Hydra and OmegaConf raise while a config is composed is put into words here.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from ddp_trainer.config import RULES, SCHEMAS, Config, ConfigError


def explain(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Return in one line what `error` says of the input; `arguments` are the command line's, to quote from."""
    cause = error.__cause__ or error.__context__
    match error:
        case ConfigError():
            return str(error)
        case OverrideParseException():
            return f"{error.override!r} cannot be read: write key=value without spaces, and quote {_SPECIAL}"
        case MissingConfigException():
            return _unknown_choice(error)
        case ConfigCompositionException() if isinstance(cause, OmegaConfBaseException | ConfigCompositionException):
            return _where(error) + explain(cause, arguments)
        case ConfigKeyError() | ConfigAttributeError():
            return _unknown_key(error, arguments)
        case MissingMandatoryValue():
            key = error.full_key or _first_line(error).rpartition(" ")[2]
            return f"{key} is not set: " + (_choose(key) if key in SCHEMAS else "give it a value")
        case InterpolationResolutionError():
            return f"{_quote(error.full_key, arguments)} cannot be resolved: {_first_line(error)}"
        case ValidationError():
            return _wrong_type(error, arguments)
        case OmegaConfBaseException():
            return f"{_quote(error.full_key, arguments)} is refused: {_first_line(error)}"
        case _:
            return _composition(str(error) or type(error).__name__, arguments)


_SPECIAL = "a value that has some, or commas, colons, quotes, braces or a bracket alone"


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return line.partition(". value: ")[0]


def _quote(key: str | None, arguments: Sequence[str]) -> str:
    """Return the argument that sets `key` as the user wrote it, or just `key` if a file sets it."""
    for argument in reversed(arguments):
        set_key = argument.partition("=")[0].lstrip("+~")
        if key and (set_key == key or set_key.startswith(f"{key}.")):
            return argument
    return key or "the config"


def _where(error: ConfigCompositionException) -> str:
    """Return ``"experiment/mine.yaml: "`` if a file and no argument is at fault."""
    found = re.match(r"In '([^']+)'", str(error))
    return f"{found[1]}.yaml: " if found else ""


# --- groups -------------------------------------------------------------------------------------


def _listed(items: Sequence[str]) -> str:
    """Return ``"a, b or c"``."""
    return " or ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _choose(group: str) -> str:
    return f"choose {group}={_listed(list(SCHEMAS[group]))}"


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    choices = [name for name in error.options or () if not name.endswith("_schema")]
    if not choices:
        return _first_line(error)
    near = get_close_matches(choice, choices, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{group}={choice} is unknown: choose {_listed(choices)}{hint}"


def _no_choice(arguments: Sequence[str]) -> str:
    """Say which argument sets a group to null, a number or the like."""
    for argument in arguments:
        group, _, value = argument.partition("=")
        if group in (*SCHEMAS, "experiment") and not isinstance(yaml.safe_load(value), str | list):
            return f"{argument} is no choice: {_choose(group) if group in SCHEMAS else 'leave it out'}"
    return "a group is set to something that is no choice"


# --- keys ---------------------------------------------------------------------------------------


def known_keys() -> dict[str, Any]:
    """Return the type of every key that a config may have under some choice of groups, by dotted name."""
    keys: dict[str, Any] = {}

    def add(schema: Any, prefix: str) -> None:
        for name, hint in get_type_hints(schema).items():
            keys[prefix + name] = hint
            choices = SCHEMAS[name].values() if not prefix and name in SCHEMAS else [hint]
            for choice in filter(is_dataclass, choices):
                add(choice, f"{prefix}{name}.")

    add(Config, "")
    return keys


def _unknown_key(error: OmegaConfBaseException, arguments: Sequence[str]) -> str:
    key = error.full_key or str(error.key)
    if key == "experiment":
        return "it must begin with the line # @package _global_ to set keys of the whole config"
    said, known = _quote(key, arguments), known_keys()
    group, _, name = key.rpartition(".")
    schema = error.object_type
    chosen = next((c for c, s in SCHEMAS.get(group, {}).items() if s is schema), None)
    if chosen and key in known:
        others = [c for c, s in SCHEMAS[group].items() if name in get_type_hints(s)]
        return f"{said} does not go with {group}={chosen}: it is a key of {group}={_listed(others)}"
    siblings = sorted(field.name for field in fields(schema)) if group and is_dataclass(schema) else []
    if near := _near(key, known, siblings):
        return f"{said} is unknown: did you mean {_listed(near)}?"
    if siblings:
        return f"{said} is unknown: {f'{group}={chosen}' if chosen else group} has {_listed(siblings)}"
    return f"{said} is unknown: --help lists the keys"


def _near(key: str, known: dict[str, Any], siblings: Sequence[str]) -> list[str]:
    """Return up to three keys that `key` may stand for: spelt much alike, or one of its name in another place."""
    group, _, name = key.rpartition(".")
    if siblings:
        near = [f"{group}.{sibling}" for sibling in get_close_matches(name, siblings)]
    else:
        near = get_close_matches(key, [other for other in known if "." not in other], cutoff=0.7)
    return near or [other for other in known if other.rpartition(".")[2] == name][:3]


# --- types --------------------------------------------------------------------------------------


def _wrong_type(error: ValidationError, arguments: Sequence[str]) -> str:
    key = re.sub(r"\[\d+\]$", "", error.full_key or "")
    hint = known_keys().get(key)
    if hint is None:
        return f"{_quote(key, arguments)} is refused: {_first_line(error)}"
    said = _quote(key, arguments)
    if said == key:
        said = f"{key}={error.value}"
    if is_dataclass(hint):
        rule = _choose(key) if key in SCHEMAS else f"set {key}.{_listed([f.name for f in fields(hint)])}"
        return f"{said} replaces a whole section: {rule}"
    return f"{said} must be {RULES.get(key) or in_words(hint)}"


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def in_words(hint: Any) -> str:
    """Return what a value of the type `hint` is called."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _listed([choice.name for choice in hint])
    if get_origin(hint) in (types.UnionType, Union):
        return _listed([in_words(part) for part in get_args(hint)])
    if get_origin(hint) is list:
        return "a list of numbers, such as [0.5, 0.5]"
    return _WORDS[hint]


# --- the rest of what Hydra says ----------------------------------------------------------------


def _composition(text: str, arguments: Sequence[str]) -> str:
    if found := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'", text):
        key, _, values = found[1].partition("=")
        return f"{found[1]} is several values: add --multirun to run each, or make it a list, '{key}=[{values}]'"
    if found := re.match(r"Could not append to config. An item is already at '(.*)'", text):
        return f"{_quote(found[1], arguments)} adds a key that exists: write {found[1]}=… to change it"
    if found := re.match(r"Could not delete from config. '(.*)'", text):
        return f"~{found[1]} removes a key that does not exist: --help lists the keys"
    if found := re.match(r"You must specify '(.*)', e.g", text):
        return f"{found[1]} is not set: {_choose(found[1])}"
    if text.startswith("Config group override must be a string or a list"):
        return _no_choice(arguments)
    text = re.split(r"\n\s*(?:Config search path|Search path|See https|Available options|full_key)", text)[0]
    return " ".join(text.split())
