"""The versions that have to be the same on all ranks."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from ddp_trainer import __version__
from ddp_trainer.config.errors import ConfigError


def installed_versions() -> dict[str, str]:
    """Return the versions of this package, Python (major and minor), torch and torchvision, without importing them.

    Raises:
        ConfigError: a package is not installed.
    """
    versions = {"ddp_trainer": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "torchvision"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            raise ConfigError(
                f"{package} is not installed in {sys.prefix}: make .venv/installed, or set PYTHON"
            ) from None
    return versions
