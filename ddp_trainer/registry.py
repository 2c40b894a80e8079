"""The choices of each config group by name: this project and plug-ins register a schema and a
builder for each.

A plug-in is a module whose import registers choices. It is found through the entry-point group
``ddp_trainer.plugins`` or named in the environment variable ``DDP_TRAINER_PLUGINS``.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

GROUPS = ("model", "data", "optimizer", "scheduler", "sync", "logger")

Builder = TypeVar("Builder", bound=Callable[..., Any])
T = TypeVar("T")


class PluginError(Exception):
    """A plug-in cannot be loaded, or its builder returns a wrong type; ``str(error)`` is the whole
    message.
    """


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a config group, which the user selects with ``<group>=<name>``."""

    name: str
    schema: type
    builder: Callable[..., Any] | str
    """The function that builds the object, or its name ``"package.module:function"``, imported when
    first needed.
    """

    def build(self, *args: Any, **options: Any) -> Any:
        """Return the object that the builder makes from the arguments; docs/extending.md lists them
        for each group.
        """
        builder = resolve_name(self.builder) if isinstance(self.builder, str) else self.builder
        return builder(*args, **options)


_choices: dict[str, dict[str, Choice]] = {group: {} for group in GROUPS}
_plugins: dict[str, str] = {}


def register(
    group: str, name: str, schema: type, builder: Callable[..., Any] | str | None = None
) -> Callable[[Builder], Builder]:
    """Register the choice `name` of `group`; without `builder`, return a decorator for the function
    that builds it.

    Raises:
        ValueError: the schema or the builder is not valid, or another schema has this name.
    """
    field = getattr(schema, "__dataclass_fields__", {}).get("name")
    if field is None or field.default != name:
        raise ValueError(
            f"{schema.__name__} must be a dataclass with the field name: str = {name!r}"
        )
    marks = "_-" if group == "logger" else "_.-"  # the keys of a logger are logger.<name>.<key>
    if not re.fullmatch(rf"\w[\w{marks}]*", name):
        valid = (
            f"letters, digits and the characters {' '.join(marks)}, and begin with a letter, a"
            " digit or _"
        )
        raise ValueError(f"{group}={name} must consist of {valid}")
    first = next(iter(_choices[group].values()), None)
    base = schema if first is None else first.schema.__mro__[-2]  # -1 is object
    if not issubclass(schema, base):
        raise ValueError(f"{schema.__name__} must be a subclass of {base.__name__}")
    try:
        OmegaConf.structured(schema)
    except OmegaConfBaseException as error:
        where = f"{schema.__name__}.{error.full_key}"
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{where} has a type that configs do not support: {reason}") from error
    taken = _choices[group].get(name)
    if taken is not None and taken.schema is not schema:
        raise ValueError(
            f"{group}={name} is already registered by {taken.schema.__module__}: choose another"
            " name"
        )

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


register_model = partial(register, "model")
register_dataset = partial(register, "data")
register_optimizer = partial(register, "optimizer")
register_scheduler = partial(register, "scheduler")
register_sync = partial(register, "sync")
register_logger = partial(register, "logger")


def choices(group: str) -> Mapping[str, Choice]:
    """Return the choices of `group` by name, in the order of their registration."""
    return MappingProxyType(_choices[group])


def find(group: str, schema: type) -> Choice | None:
    """Return the choice of `group` whose schema is exactly `schema`; None if there is none."""
    return next((choice for choice in _choices[group].values() if choice.schema is schema), None)


def build(group: str, config: Any, *args: Any, returns: type[T], **options: Any) -> T:
    """Call the builder of `group` for the class of `config` with `config`, `args` and `options`;
    return its object.

    Raises:
        PluginError: the object is not of the type `returns`.
    """
    choice = find(group, type(config))
    assert choice is not None, "checked by Config"
    result = choice.build(config, *args, **options)
    if not isinstance(result, returns):
        raise PluginError(
            f"{group}={choice.name}: the builder must return an object of type {returns.__name__},"
            f" and returned an object of type {type(result).__name__}"
        )
    return result


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import the plug-ins of installed packages, then `modules`, each once per process.

    Raises:
        PluginError: a plug-in cannot be imported.
    """
    installed = {entry.module: entry.dist for entry in entry_points(group="ddp_trainer.plugins")}
    for name in [*installed, *modules]:
        if name in _plugins:
            continue
        try:
            module = import_module(name)
        except Exception as error:  # a plug-in's module may raise anything
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            fix = "correct or uninstall the plug-in, or remove it from DDP_TRAINER_PLUGINS"
            raise PluginError(f"plug-in {name} cannot be imported ({cause}): {fix}") from error
        distribution = installed.get(name)
        _plugins[name] = distribution.version if distribution else _version(module)


def plugin_versions() -> dict[str, str]:
    """Return, by module name, the version of each plug-in, or a digest of its files if it has no
    version.
    """
    known = {"ddp_trainer", *(name.partition(".")[0] for name in _plugins)}
    modules = {
        choice.schema.__module__.partition(".")[0]
        for group in _choices.values()
        for choice in group.values()
    }
    return _plugins | {name: _version(sys.modules[name]) for name in sorted(modules - known)}


def _version(module: ModuleType) -> str:
    if version := getattr(module, "__version__", None):
        return str(version)
    file = getattr(module, "__file__", None)  # an interactive session has none
    files = [Path(file)] if file else []
    for folder in getattr(module, "__path__", ()):
        files += sorted(Path(folder).rglob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    return f"sha256:{hashlib.sha256(content).hexdigest()[:12]}"
