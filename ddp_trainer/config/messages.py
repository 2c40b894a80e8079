"""Messages about the user's input, one line each: key and value, the rule, the fix.

`check_overrides` rejects overrides that Hydra would report in its own words; `format_config_error`
rewords the errors that Hydra and OmegaConf raise while a config is composed.
"""

import os
import re
import shlex
import types
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from ddp_trainer import registry
from ddp_trainer.config.errors import ConfigError, TransientError, printable, require, suggestion
from ddp_trainer.config.keys import Keys, keys_of, known_keys

FOREIGN_KEYS = {
    "pretrained": "initial weights are read from a file, model.weights=FILE: docs/your-images.md"
    " says how to get one",
    "learning_rate": "set optimizer.lr",
    "amp": "set precision=bf16 or precision=fp16",
    "gpus": "the launcher sets the number of ranks: NPROC=2 launch/local.sh, or torchrun"
    " --nproc_per_node=2",
}
FOREIGN_KEYS |= dict.fromkeys(("devices", "num_gpus", "nproc", "ranks"), FOREIGN_KEYS["gpus"])
"""What to use instead of keys, by their last part, that other programs have."""


# --- overrides of the command line ----------------------------------------------------------------


def quote_texts(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with quotes around texts that Hydra could not read, such as ``a(1)``."""
    known = known_keys()
    return [quoted(word) if is_unreadable_text(word, known) else word for word in arguments]


def is_unreadable_text(word: str, known: Keys) -> bool:
    """Return whether `word` sets a key to a text, and Hydra's grammar does not allow this text."""
    key, equals, value = word.partition("=")
    if not equals or not is_text(key, known) or value.startswith(('"', "'")):
        return False
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return True
    return False


def is_text(key: str, known: Keys) -> bool:
    """Return whether the values of `key`, which may begin with +, are texts."""
    hint, _ = known.get(key.lstrip("+"), (None, None))
    return hint in (str, str | None)


def quoted(word: str) -> str:
    """Return ``key="value"`` for ``key=value``, as Hydra's grammar needs it for special characters.

    There, backslashes count as such, except before a quotation mark or the end of the value.
    """
    key, _, value = word.partition("=")
    escaped = re.sub(
        r'(\\*)("|$)', lambda match: match[1] * 2 + match[2].replace('"', '\\"'), value
    )
    return f'{key}="{escaped}"'


def check_overrides(arguments: Sequence[str], *, multirun: bool = False) -> None:
    """Raise ConfigError for an override that Hydra would accept by mistake or report unclearly."""
    known = known_keys()
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        key = override.key_or_group
        text = override.input_line or key
        if key.startswith(("hydra.", "hydra/")):
            continue
        require(
            override.type is not OverrideType.DEL,
            f"{text} removes a key, and every key is needed: set it instead, {key}=…",
        )
        require(
            override.type is not OverrideType.ADD or key not in known,
            f"{text} adds a key that exists: write {key}=… to change it",
        )
        require(
            multirun or not override.is_sweep_override(),
            f"{text} has several values: add --multirun to run each, or {_as_one(text, known)}",
        )
        section, _, name = key.rpartition(".")
        require(
            name != "name" or section not in registry.GROUPS,
            f"{text} cannot be set: choose with {section}=…",
        )
        section_type, _ = known.get(section, (None, None))
        require(
            get_origin(section_type) is not list or name.isdecimal(),
            f"{text} is unknown: {section} is a list, set with {section}=[…]",
        )
        if not override.is_sweep_override():
            check_value(key, override.value(), text, known)


def _as_one(text: str, known: Keys) -> str:
    """Return how to write the setting `text`, in which Hydra sees several values, as one value."""
    key, _, value = text.partition("=")
    if is_text(key, known):
        return f"quote it, {shlex.quote(quoted(text))}"
    hint, _ = known.get(key, (None, None))
    if hint is Any or {list, dict} & {get_origin(part) for part in (hint, *get_args(hint))}:
        return f"make it a list, '{key}=[{value}]'"
    return "give it one value (a decimal number has a point, as in 0.05)"


def check_value(key: str, value: Any, text: str, known: Keys) -> None:
    """Raise ConfigError for a value that is no mapping, if `key` cannot have it. text: key=value"""
    is_section = any(other.startswith(f"{key}.") for other in known)
    require(
        key in registry.GROUPS or not is_section,
        f"{text} replaces a whole section: set the keys in it",
    )
    require(
        not isinstance(value, int) or abs(value) < 2**63, f"{text} must be between -2^63 and 2^63"
    )
    names = value if isinstance(value, list) else [value]
    require(
        key not in (*registry.GROUPS, "experiment")
        or all(isinstance(name, str) and name != "???" for name in names),
        f"{text} is not the name of a choice: python -m ddp_trainer --help lists all names",
    )
    require(
        not isinstance(value, list) or key not in registry.SINGLE_GROUPS,
        f"{text} must be one choice: to run several, write --multirun {key}=A,B",
    )


# --- errors of Hydra and OmegaConf ----------------------------------------------------------------


def format_config_error(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Return one printable line about `error`, which quotes the wrong argument if it is known."""
    match error:
        case ConfigError() | TransientError() | registry.PluginError():
            message = str(error)
        case OverrideParseException():
            message = _unreadable(str(error.override))
        case MissingConfigException():
            message = _unknown_choice(error)
        case ConfigCompositionException():
            message = _composition(error, arguments)
        case MissingMandatoryValue():
            key = error.full_key or _first_line(error).rpartition(" ")[2]
            message = f"{key} is missing: give it a value"
        case ConfigKeyError() | ConfigAttributeError():
            message = _unknown_key(error, arguments)
        case ValidationError():
            message = _wrong_type(error, arguments)
        case OmegaConfBaseException():
            message = f"{_quote(error.full_key, arguments)} is not valid: {_first_line(error)}"
        case _:
            message = _first_line(error)
    return printable(message)


def _unreadable(word: str) -> str:
    key, equals, value = word.partition("=")
    if key == "data" or os.path.isdir(word):
        folder = shlex.quote(f"data.root={value or word}")
        fix = (
            f"data= chooses a kind of data; for a folder of images, write data=imagefolder {folder}"
        )
    elif not equals:
        fix = "a setting is key=value; put one that has spaces in quotes, 'key=a b'"
    else:
        fix = "write key=value without spaces, and quote special characters"
    return f"{word!r} cannot be read: {fix}"


def _unknown_choice(error: MissingConfigException) -> str:
    file = error.missing_cfg_file or ""
    group, _, choice = file.partition("/")
    if group not in registry.GROUPS:
        group, _, choice = file.rpartition("/")
    if choice == "optuna":
        return "hydra/sweeper=optuna is not installed: pip install 'ddp_trainer[sweep]'"
    names = registry.choices(group) if group in registry.GROUPS else error.options
    if not names:
        return _first_line(error)
    fix = _architecture(choice) if group == "model" else ""
    if group == "data" and os.path.isdir(os.path.expanduser(choice)):
        fix = f"data=imagefolder data.root={shlex.quote(choice)}"
    if fix:
        return f"{group}={choice} is not a valid choice: write {fix}"
    near = suggestion(choice, names).removeprefix(": ")
    folder = "; for a folder of images, data=imagefolder data.root=FOLDER" * (group == "data")
    return (
        f"{group}={choice} is not a valid choice: {near}{near and ' '}choose from"
        f" {', '.join(sorted(names))}{folder}"
    )


def _architecture(name: str) -> str:
    """Return the settings that choose the model `name` of torchvision or timm; "" for others."""
    spellings = [name, name.lower(), name.lower().replace("-", "_"), name.lower().replace("-", "")]
    for library, module in (("torchvision", "torchvision.models"), ("timm", "timm")):
        with suppress(ImportError):
            names = import_module(module).list_models()
            for arch in filter(names.__contains__, spellings):
                return f"model={library} model.arch={arch}"
    return ""


def _composition(error: ConfigCompositionException, arguments: Sequence[str]) -> str:
    """Return the message for `error`: its cause reworded, after the name of the file, if any.

    For example, "In 'experiment/mine': …" becomes "experiment/mine.yaml: …".
    """
    cause = error.__cause__ or error.__context__
    if not isinstance(cause, OmegaConfBaseException | ConfigCompositionException):
        return _first_line(error)
    before, quote, rest = str(error).partition("'")
    file = f"{rest.partition(quote)[0]}.yaml: " if before == "In " and quote else ""
    return file + format_config_error(cause, arguments)


def _unknown_key(error: ConfigKeyError | ConfigAttributeError, arguments: Sequence[str]) -> str:
    key = error.full_key or str(error.key)
    if key == "experiment":
        return (
            "experiment has no keys: write keys without the prefix 'experiment.', and begin a file"
            " of conf/experiment with the line # @package _global_"
        )
    text = _quote(key, arguments)
    section, _, name = key.rpartition(".")
    if name in FOREIGN_KEYS:
        return f"{text} is unknown: {FOREIGN_KEYS[name]}"
    schema: Any = error.object_type
    choice = registry.find(section, schema) if section in registry.GROUPS else None
    owner = f"{section}={choice.name}" if choice else section
    known = known_keys()
    if choice and key in known:
        choices = registry.choices(section).values()
        others = [other.name for other in choices if name in _field_names(other.schema)]
        where = f"{section}={' or '.join(others)}"
        fix = "; for a folder of images, add data=imagefolder" * ("imagefolder" in others)
        return f"{text} does not belong to {owner}: it is a key of {where}{fix}"
    names = _field_names(schema)
    siblings = [f"{section}.{sibling}".lstrip(".") for sibling in names]
    fix = (
        f"{owner} has {', '.join(sorted(names))}" if section and names else "--help lists the keys"
    )
    return f"{text} is unknown{suggestion(key, siblings) or suggestion(key, known) or f': {fix}'}"


def _wrong_type(error: ValidationError, arguments: Sequence[str]) -> str:
    key = (error.full_key or "").partition("[")[0]
    known = known_keys()
    if is_dataclass(error.object_type):  # may be the options of a command
        known |= keys_of([("", error.object_type)])
    hint, metadata = known.get(key, (error.ref_type, {}))
    text = _quote(key, arguments)
    if text == key:
        text = f"{key}={error.value}"
    if is_dataclass(hint):
        return f"{text} replaces a whole section: set the keys in it"
    # a key that may be auto has a rule that mentions auto
    rule = metadata.get("must_be") if str in get_args(hint) else None
    if is_text(key, known) and text in arguments:
        return f"{text} must be text: quote it, {shlex.quote(quoted(text))}"
    return f"{text} must be {rule or in_words(hint)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).partition(". value: ")[0]


def _quote(key: str | None, arguments: Sequence[str]) -> str:
    """Return the last of `arguments` that sets `key`, or a key below it.

    If there is none, return `key`; if `key` is None or empty, return "the config".
    """
    for argument in reversed(arguments):
        set_key = argument.partition("=")[0].lstrip("+~")
        if key and (set_key == key or set_key.startswith(f"{key}.")):
            return argument
    return key or "the config"


def _field_names(schema: Any) -> list[str]:
    return [item.name for item in fields(schema)] if is_dataclass(schema) else []


WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    dict: "a section",
    list: "a list, such as [a, b]",
    list[int]: "a list of whole numbers, such as [2, 4]",
    list[float]: "a list of numbers, such as [0.5, 0.5]",
}


def in_words(hint: Any) -> str:
    """Return a description of the values of type `hint`, for example "a whole number"."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(choice.name for choice in hint)}"
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(in_words(part) for part in get_args(hint))
    if get_origin(hint) is list:
        hint = list[get_args(hint)]  # OmegaConf gives typing.List
    return WORDS.get(hint) or WORDS.get(get_origin(hint), "of another type")
