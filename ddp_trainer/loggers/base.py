"""`Logger`, the base class of all loggers, and the group of those that a run has."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from ddp_trainer import registry
from ddp_trainer.config.loggers import LoggerConfig

logger = logging.getLogger(__name__)

Value = float | str


class Logger:
    """Records a run somewhere. Every method may be left out; the base class does nothing."""

    def start(self, step: int) -> None:
        """Prepare to record after optimizer step `step`; records of an earlier launch past it are to be dropped."""

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        """Record `values` by tag at optimizer step `step`. ``epoch`` is among them; some are text."""

    def image(self, tag: str, png: bytes, step: int) -> None:
        """Record a picture, a PNG file's content."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Record a text in Markdown."""

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Record the final `results` beside the config (flat, by dotted key) that they came from."""

    def close(self) -> None:
        """Write what is left and close files."""


class LoggerGroup(Logger):
    """Several loggers as one. A logger that fails is reported once, until it works again, and never ends a training.

    Nothing is recorded before `start`, as by a launch that finds its run finished. On ranks other than 0 the group is
    empty. Use as a context manager: leaving it closes all.
    """

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self.loggers = dict(loggers)
        self.failing: set[str] = set()
        self.is_started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self, step: int) -> None:
        self.is_started = True
        self._call("start", step)

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        self._call("scalars", values, step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        self._call("image", tag, png, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._call("text", tag, text, step)

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        self._call("hparams", config, results)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of each logger."""
        for name, one in self.loggers.items() if self.is_started else ():
            try:
                getattr(one, method)(*arguments)
            except Exception as error:  # a logger's client may raise anything
                if name not in self.failing:
                    logger.warning("logger=%s failed (%s: %s); training continues", name, type(error).__name__, error)
                self.failing.add(name)
            else:
                self.failing.discard(name)


def build_loggers(configs: Iterable[LoggerConfig], run_dir: Path) -> LoggerGroup:
    """Return the loggers that `configs` choose, writing to `run_dir`."""
    return LoggerGroup({config.name: registry.build("logger", config, run_dir, returns=Logger) for config in configs})
