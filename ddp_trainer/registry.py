"""The config groups, and the choices of each: a schema and a builder, registered once by name.

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

Builder = TypeVar("Builder", bound=Callable[..., Any])
T = TypeVar("T")


class PluginError(Exception):
    """A plug-in cannot be loaded or returns a wrong type; ``str(error)`` is the whole message."""


@dataclass(frozen=True, slots=True)
class Group:
    """A config group, such as ``optimizer``."""

    name: str
    base: str
    """The base class of the group's schemas, as ``"package.module:class"``."""
    several: bool = False
    """Whether a run has a list of choices, such as ``logger=[csv,jsonl]``, instead of one."""

    def key(self, choice: str) -> str:
        """Return the config key of `choice`: ``optimizer``, or ``logger.csv`` if in a list."""
        return f"{self.name}.{choice}" if self.several else self.name

    def sections(self, value: Any) -> dict[str, Any]:
        """Return the chosen sections by config key; value: what a config has for this group."""
        if not self.several:
            return {self.name: value}
        return {self.key(choice): section for choice, section in value.items()}


_CONFIG = "ddp_trainer.config"
GROUPS = {
    group.name: group
    for group in (
        Group("model", f"{_CONFIG}.models:ModelConfig"),
        Group("data", f"{_CONFIG}.data:DataConfig"),
        Group("loss", f"{_CONFIG}.losses:LossConfig"),
        Group("optimizer", f"{_CONFIG}.optimizers:OptimizerConfig"),
        Group("scheduler", f"{_CONFIG}.schedulers:SchedulerConfig"),
        Group("sync", f"{_CONFIG}.sync:SyncConfig"),
        Group("metric", f"{_CONFIG}.metrics:MetricConfig", several=True),
        Group("logger", f"{_CONFIG}.loggers:LoggerConfig", several=True),
        Group("observer", f"{_CONFIG}.observers:ObserverConfig", several=True),
    )
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a config group, which the user selects with ``<group>=<name>``."""

    name: str
    schema: type
    builder: Callable[..., Any] | str
    """The function that builds the object, or ``"package.module:function"``, imported later."""


_choices: dict[str, dict[str, Choice]] = {group: {} for group in GROUPS}
_plugins: dict[str, str] = {}


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
    if taken is not None and taken.schema is not schema:
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
    base = resolve_name(group.base)
    if not issubclass(schema, base):
        raise ValueError(f"{schema.__name__} must be a subclass of {base.__name__}")
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
    return MappingProxyType(_choices[group])


def find(group: str, schema: type) -> Choice | None:
    """Return the choice of `group` whose schema is exactly `schema`; None if there is none."""
    return next((choice for choice in _choices[group].values() if choice.schema is schema), None)


def build(group: str, config: Any, *args: Any, returns: type[T], **options: Any) -> T:
    """Return the object that the builder of the class of `config` makes from the arguments.

    docs/api.md lists the arguments by group.

    Raises:
        PluginError: the object is not of the type `returns`.
    """
    choice = find(group, type(config))
    assert choice is not None, "checked by Config"
    builder = choice.builder
    if isinstance(builder, str):
        builder = resolve_name(builder)
    result = builder(config, *args, **options)
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
    """Return the version of each plug-in, or a digest of its files without one, by module name."""
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
