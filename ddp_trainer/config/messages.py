"""Messages about the user's input, one line each: key and value, the rule, the fix.

`check_overrides` rejects overrides that Hydra would report in its own words; `format_config_error`
rewords the errors that Hydra and OmegaConf raise while a config is composed.
"""

import types
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import singledispatch
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from ddp_trainer import registry
from ddp_trainer.config.errors import ConfigError, TransientError, printable, require
from ddp_trainer.config.keys import Keys, known_keys

HELP = "--help lists the keys"
RENAMED = {"label_smoothing": "loss.label_smoothing"}
"""The keys of former versions that have another name now."""


# --- overrides of the command line ----------------------------------------------------------------


def check_overrides(arguments: Sequence[str], *, multirun: bool = False) -> None:
    """Raise ConfigError for an override that Hydra would accept by mistake or report unclearly."""
    known = known_keys()
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        key = override.key_or_group
        text = override.input_line or key
        if key.split(".")[0] == "hydra" or key.startswith("hydra/"):
            continue
        if override.type is OverrideType.DEL:
            fix = (
                f"is needed: set it instead, {key}=…" if key in known else f"does not exist: {HELP}"
            )
            raise ConfigError(f"{text} removes a key that {fix}")
        require(
            override.type is not OverrideType.ADD or key not in known,
            f"{text} adds a key that exists: write {key}=… to change it",
        )
        require(
            multirun or not override.is_sweep_override(),
            f"{text} has several values: add --multirun to run each, "
            f"or make it a list, '{key}=[{text.partition('=')[2]}]'",
        )
        _check_value(key, override, text)
        _check_key(key, text, known)


def _check_value(key: str, override: Override, text: str) -> None:
    if override.is_sweep_override():
        return
    value = override.value()
    require(not isinstance(value, int) or abs(value) < 2**63, f"{text} must be below 2^63")
    if key in (*registry.GROUPS, "experiment"):
        names = value if isinstance(value, list) else [value]
        are_names = all(isinstance(name, str) and name != "???" for name in names)
        require(are_names, f"{text} is not a valid choice: {choose(key)}")


def _check_key(key: str, text: str, known: Keys) -> None:
    section, _, name = key.rpartition(".")
    require(
        not key.startswith("experiment."),
        f"{text} is unknown: write the key without the prefix 'experiment.'",
    )
    require(
        name != "name" or section not in registry.GROUPS,
        f"{text} cannot be set: choose with {section}=…",
    )
    section_type, _ = known.get(section, (None, None))
    require(
        get_origin(section_type) is not list or name.isdecimal(),
        f"{text} is unknown: {section} is a list, set with {section}=[…]",
    )


# --- errors of Hydra and OmegaConf ----------------------------------------------------------------


def format_config_error(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Return a printable one-line message, which quotes the one of `arguments` that is wrong."""
    return printable(_reword(error, arguments))


@singledispatch
def _reword(error: BaseException, arguments: Sequence[str]) -> str:
    """Return the message about an error; the functions below return those of their error types."""
    return _first_line(error)


@_reword.register
def _own(error: ConfigError | TransientError | registry.PluginError, _: Sequence[str]) -> str:
    return str(error)


@_reword.register
def _unreadable(error: OverrideParseException, _: Sequence[str]) -> str:
    return (
        f"{error.override!r} cannot be read: write key=value without spaces, and quote special"
        " characters"
    )


@_reword.register
def _unknown_choice(error: MissingConfigException, _: Sequence[str]) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if group not in registry.GROUPS and not error.options:
        return _first_line(error)
    near = get_close_matches(choice, error.options or (), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{group}={choice} is not a valid choice: {choose(group, error.options)}{hint}"


@_reword.register
def _composition(error: ConfigCompositionException, arguments: Sequence[str]) -> str:
    """Reword the cause. If a file is at fault, the message is "In 'experiment/mine': …"."""
    cause = error.__cause__ or error.__context__
    if not isinstance(cause, OmegaConfBaseException | ConfigCompositionException):
        return _first_line(error)
    before, quote, rest = str(error).partition("'")
    file = f"{rest.partition(quote)[0]}.yaml: " if before == "In " and quote else ""
    return file + _reword(cause, arguments)


@_reword.register
def _missing(error: MissingMandatoryValue, arguments: Sequence[str]) -> str:
    key = error.full_key or _first_line(error).rpartition(" ")[2]
    return f"{key} is missing: {choose(key) if key in registry.GROUPS else 'give it a value'}"


@_reword.register
def _unresolved(error: InterpolationResolutionError, arguments: Sequence[str]) -> str:
    reason = _first_line(error)
    return f"{_quote(error.full_key, arguments)} cannot be resolved: {reason}"


@_reword.register
def _invalid(error: OmegaConfBaseException, arguments: Sequence[str]) -> str:
    return f"{_quote(error.full_key, arguments)} is not valid: {_first_line(error)}"


@_reword.register
def _unknown_key(error: ConfigKeyError | ConfigAttributeError, arguments: Sequence[str]) -> str:
    key = error.full_key or str(error.key)
    text = _quote(key, arguments)
    if key == "experiment":
        return "it must begin with the line # @package _global_ to set keys of the whole config"
    if key in RENAMED:
        return f"{text} is now {RENAMED[key]}{text.removeprefix('+').removeprefix(key)}"
    return f"{text} {_reason_and_fix(key, error.object_type)}"


def _reason_and_fix(key: str, schema: Any) -> str:
    """Return why `schema` does not have `key`, and what the user may have meant."""
    section, _, name = key.rpartition(".")
    choices = registry.choices(section).values() if section in registry.GROUPS else ()
    chosen = next((f"{section}={choice.name}" for choice in choices if choice.schema is schema), "")
    if chosen and key in known_keys():
        others = [choice.name for choice in choices if name in _field_names(choice.schema)]
        return f"does not belong to {chosen}: it is a key of {section}={_listed(others)}"
    if similar := _similar_keys(key, schema):
        return f"is unknown: did you mean {_listed(similar)}?"
    names = sorted(_field_names(schema))
    if not section or not names:
        return f"is unknown: {HELP}"
    return f"is unknown: {chosen or section} has {', '.join(names)}"


def _similar_keys(key: str, schema: Any) -> list[str]:
    """Return keys that the user may have meant by `key`, an unknown key of `schema`."""
    section, _, name = key.rpartition(".")
    # a lower cutoff would find unrelated names among the many keys of the root
    names = get_close_matches(name, _field_names(schema), cutoff=0.6 if section else 0.7)
    if names:
        return [f"{section}.{similar}".lstrip(".") for similar in names]
    elsewhere = [other for other in known_keys() if other.rpartition(".")[2] == name][:3]
    is_list = section in registry.GROUPS and registry.GROUPS[section].several
    return elsewhere or ([section] if is_list else [])


@_reword.register
def _wrong_type(error: ValidationError, arguments: Sequence[str]) -> str:
    key = (error.full_key or "").partition("[")[0]
    # the keys of a command's own options are not keys of the config
    options = get_type_hints(error.object_type) if is_dataclass(error.object_type) else {}
    hint, metadata = known_keys().get(key, (options.get(key), {}))
    text = _quote(key, arguments)
    if hint is None:
        return _invalid(error, arguments)
    if text == key:
        text = f"{key}={error.value}"
    if is_dataclass(hint):
        is_group = key in registry.GROUPS
        fix = choose(key) if is_group else f"set {key}.{_listed(_field_names(hint))}"
        return f"{text} replaces a whole section: {fix}"
    # if the key may be auto, its rule says so
    rule = metadata.get("must_be") if str in get_args(hint) else None
    return f"{text} must be {rule or in_words(hint)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).partition(". value: ")[0]


def _quote(key: str | None, arguments: Sequence[str]) -> str:
    """Return the one of `arguments` that sets `key`, or `key` itself if a file sets it."""
    for argument in reversed(arguments):
        set_key = argument.partition("=")[0].lstrip("+~")
        if key and (set_key == key or set_key.startswith(f"{key}.")):
            return argument
    return key or "the config"


def choose(group: str, options: Iterable[str] | None = None) -> str:
    """Return the valid choices of `group`, for the end of a message. options: those of Hydra."""
    if group == "experiment" and not options:
        return "name a file of conf/experiment, or leave experiment out"
    return f"choose from {', '.join(sorted(options or registry.choices(group)))}"


def _field_names(schema: Any) -> list[str]:
    return [item.name for item in fields(schema)] if is_dataclass(schema) else []


def _listed(items: Sequence[str]) -> str:
    """Return `items` as one text, ``"a, b or c"``."""
    *first, last = items
    return f"{', '.join(first)} or {last}" if first else last


WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    dict: "a section",
}


def in_words(hint: Any) -> str:
    """Return words for the values of the type `hint`, for example "a whole number"."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(choice.name for choice in hint)}"
    if get_origin(hint) in (types.UnionType, Union):
        return _listed([in_words(part) for part in get_args(hint)])
    if get_origin(hint) is list:
        return (
            "a list of numbers, such as [0.5, 0.5]"
            if get_args(hint) == (float,)
            else "a list, such as [a, b]"
        )
    return WORDS.get(get_origin(hint) or hint, "of another type")
