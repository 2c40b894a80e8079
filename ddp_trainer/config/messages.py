"""Messages about the user's input, one line each: key and value, the rule, the fix.

`check_overrides` rejects overrides that Hydra would report in its own words; `format_config_error`
rewords the errors that Hydra and OmegaConf raise while a config is composed.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
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
from ddp_trainer.config.schema import Config

HELP = "--help lists the keys"


def check_overrides(arguments: Sequence[str], *, multirun: bool = False) -> None:
    """Check command-line overrides; ConfigError for one that Hydra would accept by mistake or
    report unclearly.
    """
    known = known_keys()
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        key = override.key_or_group
        text = override.input_line or override.key_or_group
        if key.split(".")[0] == "hydra" or key.startswith("hydra/"):
            continue
        if override.type is OverrideType.DEL:
            reason = (
                f"is needed: set it instead, {key}=…" if key in known else f"does not exist: {HELP}"
            )
            raise ConfigError(f"{text} removes a key that {reason}")
        require(
            multirun or not override.is_sweep_override(),
            f"{text} has several values: add --multirun to run each, "
            f"or make it a list, '{key}=[{text.partition('=')[2]}]'",
        )
        require(
            override.type is not OverrideType.ADD or key not in known,
            f"{text} adds a key that exists: write {key}=… to change it",
        )
        value = "" if override.is_sweep_override() else override.value()
        require(not isinstance(value, int) or abs(value) < 2**63, f"{text} must be below 2^63")
        if key in (*registry.GROUPS, "experiment"):
            names = value if isinstance(value, list) else [value]
            are_names = all(isinstance(name, str) and name != "???" for name in names)
            require(are_names, f"{text} is not a valid choice: {choose(key)}")
        require(
            not key.startswith("experiment."),
            f"{text} is unknown: write the key without the prefix 'experiment.'",
        )
        group, _, name = key.rpartition(".")
        require(
            name != "name" or group not in registry.GROUPS,
            f"{text} cannot be set: choose with {group}=…",
        )
        is_list = get_origin(known.get(group, (None,))[0]) is list
        require(
            not is_list or name.isdecimal(),
            f"{text} is unknown: {group} is a list, set with {group}=[…]",
        )


def format_config_error(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Return a one-line message for `error`, which quotes the wrong one of the command-line
    `arguments`.
    """
    cause = error.__cause__ or error.__context__
    match error:
        case ConfigError() | TransientError() | registry.PluginError():
            text = str(error)
        case OverrideParseException():
            text = (
                f"{error.override!r} cannot be read: write key=value without spaces, and quote"
                " special characters"
            )
        case MissingConfigException():
            text = _unknown_choice(error)
        case ConfigCompositionException() if isinstance(
            cause, OmegaConfBaseException | ConfigCompositionException
        ):
            # In 'experiment/mine': …, if a file is at fault
            before, quoted, rest = str(error).partition("'")
            text = f"{rest.partition(quoted)[0]}.yaml: " if before == "In " and quoted else ""
            text += format_config_error(cause, arguments)
        case ConfigKeyError() | ConfigAttributeError():
            text = _unknown_key(error, arguments)
        case MissingMandatoryValue():
            key = error.full_key or _first_line(error).rpartition(" ")[2]
            text = (
                f"{key} is missing: {choose(key) if key in registry.GROUPS else 'give it a value'}"
            )
        case InterpolationResolutionError():
            text = f"{_quote(error.full_key, arguments)} cannot be resolved: {_first_line(error)}"
        case ValidationError():
            text = _wrong_type(error, arguments)
        case OmegaConfBaseException():
            text = f"{_quote(error.full_key, arguments)} is not valid: {_first_line(error)}"
        case _:
            text = _first_line(error)
    return printable(text)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).partition(". value: ")[0]


def _quote(key: str | None, arguments: Sequence[str]) -> str:
    """Return the one of `arguments` that sets `key`, as the user wrote it, or `key` itself if a
    file sets it.
    """
    for argument in reversed(arguments):
        set_key = argument.partition("=")[0].lstrip("+~")
        if key and (set_key == key or set_key.startswith(f"{key}.")):
            return argument
    return key or "the config"


def choose(group: str) -> str:
    """Return the end of a message about a wrong choice of `group`, which says what is valid."""
    if group == "experiment":
        return "name a file of conf/experiment, or leave experiment out"
    return f"choose from {', '.join(sorted(registry.choices(group)))}"


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or (registry.choices(group) if group in registry.GROUPS else ()))
    if not options:
        return _first_line(error)
    near = get_close_matches(choice, options, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{group}={choice} is not a valid choice: choose from {', '.join(options)}{hint}"


def known_keys() -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return type and metadata of every config key by its dotted name, for all choices of all
    groups.
    """
    keys: dict[str, tuple[Any, Mapping[str, Any]]] = {}

    def add(schema: Any, prefix: str) -> None:
        hints = get_type_hints(schema)
        for field in fields(schema):
            name = field.name
            hint = hints[field.name]
            keys[prefix + name] = (hint, field.metadata)
            if not prefix and name in registry.GROUPS:
                for choice in registry.choices(name).values():
                    add(choice.schema, f"logger.{choice.name}." if name == "logger" else f"{name}.")
            elif is_dataclass(hint):
                add(hint, f"{prefix}{name}.")

    add(Config, "")
    return keys


def _unknown_key(error: OmegaConfBaseException, arguments: Sequence[str]) -> str:
    key = error.full_key or str(error.key)
    if key == "experiment":
        return "it must begin with the line # @package _global_ to set keys of the whole config"
    text = _quote(key, arguments)
    known = known_keys()
    group, _, name = key.rpartition(".")
    schema = error.object_type
    choices = registry.choices(group) if group in registry.GROUPS else {}
    section = next(
        (f"{group}={choice.name}" for choice in choices.values() if choice.schema is schema), group
    )
    if key in known and section != group:
        others = [
            other for other, choice in choices.items() if name in choice.schema.__dataclass_fields__
        ]
        return f"{text} does not belong to {section}: it is a key of {group}={_listed(others)}"
    siblings = sorted(field.name for field in fields(schema)) if is_dataclass(schema) else []
    near = [
        f"{group}.{other}".lstrip(".")
        for other in get_close_matches(name, siblings, cutoff=0.6 if group else 0.7)
    ]
    near = near or [other for other in known if other.rpartition(".")[2] == name][:3]
    if near or group == "logger":
        return f"{text} is unknown: did you mean {_listed(near or [group])}?"
    return f"{text} is unknown: " + (
        f"{section} has {', '.join(siblings)}" if group and siblings else HELP
    )


def _listed(items: Sequence[str]) -> str:
    """Return `items` as one text, ``"a, b or c"``."""
    return " or ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _wrong_type(error: ValidationError, arguments: Sequence[str]) -> str:
    key = (error.full_key or "").partition("[")[0]
    # the keys of a command
    options = get_type_hints(error.object_type) if is_dataclass(error.object_type) else {}
    hint, metadata = known_keys().get(key, (options.get(key), {}))
    text = _quote(key, arguments)
    if hint is None:
        return f"{text} is not valid: {_first_line(error)}"
    if text == key:
        text = f"{key}={error.value}"
    if is_dataclass(hint):
        rule = (
            choose(key)
            if key in registry.GROUPS
            else f"set {key}.{_listed([field.name for field in fields(hint)])}"
        )
        return f"{text} replaces a whole section: {rule}"
    # if the key may be auto, its rule says so
    rule = metadata.get("must_be") if str in get_args(hint) else None
    return f"{text} must be {rule or in_words(hint)}"


WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    dict: "a section",
}


def in_words(hint: Any) -> str:
    """Return words that describe values of the type `hint`, for example "a whole number"."""
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
