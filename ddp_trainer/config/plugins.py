"""Plug-ins: modules whose import registers choices of the config groups.

A plug-in is found through the entry-point group ``ddp_trainer.plugins``, or is named in the
environment variable ``DDP_TRAINER_PLUGINS``.
"""

import hashlib
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from ddp_trainer import registry
from ddp_trainer.registry import PluginError

_plugins: dict[str, str] = {}


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
            distribution = installed.get(name)
            _plugins[name] = distribution.version if distribution else _version(module)
        except (Exception, SystemExit) as error:  # a plug-in's module may raise anything
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            fix = "correct or uninstall the plug-in, or remove it from DDP_TRAINER_PLUGINS"
            raise PluginError(f"plug-in {name} cannot be imported ({cause}): {fix}") from error


def plugin_versions() -> dict[str, str]:
    """Return each plug-in's version by module name; a digest of its files if it has no version."""
    modules = {
        choice.schema.__module__.partition(".")[0]
        for group in registry.GROUPS
        for choice in registry.choices(group).values()
    }
    return _plugins | {
        name: _version(sys.modules[name]) for name in sorted(modules - {"ddp_trainer", *_plugins})
    }


def _version(module: ModuleType) -> str:
    if version := getattr(module, "__version__", None):
        return str(version)
    file = getattr(module, "__file__", None)  # an interactive session has none
    files = [Path(file)] if file else []
    for folder in getattr(module, "__path__", ()):
        files += sorted(Path(folder).rglob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    return f"sha256:{hashlib.sha256(content).hexdigest()[:12]}"
