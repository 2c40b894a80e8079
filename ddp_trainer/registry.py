"""The config groups, and the choices of each: a schema and a builder, registered once by name."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

Builder = TypeVar("Builder", bound=Callable[..., Any])
T = TypeVar("T")


class PluginError(Exception):
    """A plug-in cannot be loaded or returns a wrong type; ``str(error)`` is the whole message."""


@dataclass(frozen=True, slots=True)
class Group:
    """A config group, such as ``optimizer``."""

    name: str
    several: bool = False
    """Whether a run has a list of choices, such as ``logger=[jsonl,wandb]``, instead of one."""

    def key(self, choice: str) -> str:
        """Return the config key of `choice`: ``optimizer``, or ``logger.jsonl`` if in a list."""
        return f"{self.name}.{choice}" if self.several else self.name

    def sections(self, value: Any) -> dict[str, Any]:
        """Return the chosen sections by config key. value: the value of this group in a config."""
        if not self.several:
            return {self.name: value}
        return {self.key(choice): section for choice, section in value.items()}


SINGLE_GROUPS = ("model", "data", "loss", "optimizer", "scheduler", "sync")
LIST_GROUPS = ("metric", "logger", "observer")
GROUPS = {name: Group(name) for name in SINGLE_GROUPS} | {
    name: Group(name, several=True) for name in LIST_GROUPS
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a config group, which the user selects with ``<group>=<name>``."""

    name: str
    schema: type
    builder: Callable[..., Any] | str
    """The function that builds the object, or ``"package.module:function"``, imported later."""


_choices: dict[str, dict[str, Choice]] = {group: {} for group in GROUPS}


def register(
    group: str, name: str, schema: type, builder: Callable[..., Any] | str | None = None
) -> Callable[[Builder], Builder]:
    """Register a choice; without `builder`, return a decorator for the function that builds it.

    Raises:
        ValueError: the schema or the builder is not valid, or another schema has this name.
    """
    _check_name(GROUPS[group], name, schema)
    _check_schema(GROUPS[group], name, schema)

    def add(function: Any) -> Any:
        if not callable(function) and not re.fullmatch(r"[\w.]+:\w+", function):
            raise ValueError(
                f'the builder of {group}={name} must be a function or "package.module:function"'
            )
        _choices[group][name] = Choice(name, schema, function)
        return function

    if builder is not None:
        add(builder)
    return add


def _check_name(group: Group, name: str, schema: type) -> None:
    marks = "_-" if group.several else "_.-"  # a dot would separate two config keys
    if not re.fullmatch(rf"\w[\w{marks}]*", name):
        raise ValueError(
            f"{group.name}={name} must consist of letters, digits and the characters"
            f" {' '.join(marks)}, and begin with a letter, a digit or _"
        )
    taken = _choices[group.name].get(name)
    # a module that is imported again, or a cell that runs again, makes another class of that name
    if taken is not None and repr(taken.schema) != repr(schema):
        raise ValueError(
            f"{group.name}={name} is already registered by {taken.schema.__module__}: choose"
            " another name"
        )


def _check_schema(group: Group, name: str, schema: type) -> None:
    field = getattr(schema, "__dataclass_fields__", {}).get("name")
    if field is None or field.default != name:
        raise ValueError(
            f"{schema.__name__} must be a dataclass with the field name: str = {name!r}"
        )
    base = f"{group.name.title()}Config"  # each group's public base class, such as LossConfig
    if base not in [parent.__name__ for parent in schema.__mro__]:
        raise ValueError(f"{schema.__name__} must be a subclass of {base}")
    try:
        OmegaConf.structured(schema)
    except OmegaConfBaseException as error:
        where = f"{schema.__name__}.{error.full_key}"
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{where} has a type that configs do not support: {reason}") from error


register_model = partial(register, "model")
register_dataset = partial(register, "data")
register_loss = partial(register, "loss")
register_optimizer = partial(register, "optimizer")
register_scheduler = partial(register, "scheduler")
register_sync = partial(register, "sync")
register_metric = partial(register, "metric")
register_logger = partial(register, "logger")
register_observer = partial(register, "observer")


def choices(group: str) -> Mapping[str, Choice]:
    """Return the choices of `group` by name, in the order of their registration."""
    return _choices[group]


def find(group: str, schema: type) -> Choice | None:
    """Return the choice of `group` whose schema is exactly `schema`; None if there is none."""
    return next((choice for choice in _choices[group].values() if choice.schema is schema), None)


def build(group: str, config: Any, *args: Any, returns: type[T], **options: Any) -> T:
    """Return the object that the builder of the choice with the schema ``type(config)`` makes.

    The builder gets `config` and the other arguments, which docs/api.md lists by group.

    Raises:
        PluginError: the object is not of the type `returns`.
    """
    choice = find(group, type(config))
    assert choice is not None, "checked by Config"
    builder = choice.builder
    if isinstance(builder, str):
        builder = resolve_name(builder)
    try:
        result = builder(config, *args, **options)
    except SystemExit as error:  # it would end the program with the exit code of a success
        raise PluginError(f"{group}={choice.name}: the builder has called exit") from error
    if not isinstance(result, returns):
        raise PluginError(
            f"{group}={choice.name}: the builder must return an object of type {returns.__name__},"
            f" and returned an object of type {type(result).__name__}"
        )
    return result
