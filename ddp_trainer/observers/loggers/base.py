"""`Logger`, the base class of all loggers, and `LoggerGroup`, all loggers of a run."""

import logging
import queue
import secrets
import threading
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from ddp_trainer import registry
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.config.loggers import LoggerConfig
from ddp_trainer.files import replace_text

logger = logging.getLogger(__name__)

Value = float | str

CLOSE_SECONDS = 60.0
FAILURE_CLOSE_SECONDS = 5.0
"""How long the end of a run waits for a logger that has a thread; the second number applies after
an exception.
"""
MAX_PENDING_CALLS = 10_000
"""The largest number of calls that wait for a logger's thread. When so many wait, new calls are
dropped.
"""


class Logger:
    """Records a run. A subclass overrides the methods that it needs; the methods of this base class
    do nothing.
    """

    in_background: ClassVar[bool] = False
    """Whether another thread calls the methods, so that a server that is slow or does not answer
    delays no step.
    """

    def start(self, step: int) -> None:
        """Prepare to record the steps after optimizer step `step`; delete an earlier launch's
        records of them.
        """

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        """Record `values` by tag at optimizer step `step`. One of the tags is ``epoch``; some
        values are text.
        """

    def image(self, tag: str, png: bytes, step: int) -> None:
        """Record a picture; `png` is the content of a PNG file."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Record a text in Markdown."""

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Record the final `results` together with the `config` (flat, by dotted key) of
        the run.
        """

    def close(self) -> None:
        """Write the pending records and close files."""


class LoggerCalls:
    """Calls the methods of one logger. Of consecutive exceptions, only the first is logged, as a
    warning.
    """

    def __init__(self, name: str, wrapped: Logger) -> None:
        self.name = name
        self.wrapped = wrapped
        self.is_failing = False

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method. Log any exception as a warning, but raise a KeyboardInterrupt of the main
        thread again.
        """
        try:
            getattr(self.wrapped, method)(*arguments)
        except BaseException as error:
            if (
                isinstance(error, KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()
            ):
                raise
            self.report_failure(f"{type(error).__name__}: {error}")
        else:
            self.is_failing = False

    def report_failure(self, reason: str) -> None:
        """Log a warning with `reason`, unless the previous call of a method of the logger failed
        too.
        """
        if not self.is_failing:
            logger.warning(
                "logger=%s failed (%s); training continues", self.name, " ".join(reason.split())
            )
        self.is_failing = True

    def close(self, seconds: float) -> None:
        """Close the logger. If it has a thread, wait for the thread for at most `seconds`."""
        self.call("close")


class BackgroundCalls(LoggerCalls):
    """Calls the methods of one logger in a thread, in the order of the calls; `call` returns at
    once.
    """

    def __init__(self, name: str, wrapped: Logger) -> None:
        super().__init__(name, wrapped)
        self.pending: queue.Queue[tuple[Any, ...] | None] = queue.Queue(MAX_PENDING_CALLS)
        # A daemon, because the process must be able to end while a client waits for its server.
        self.thread = threading.Thread(target=self.work, name=f"logger={name}", daemon=True)
        self.thread.start()

    def work(self) -> None:
        """Take calls from the queue and make them, until None comes."""
        while (call := self.pending.get()) is not None:
            super().call(*call)

    def call(self, method: str, *arguments: Any) -> None:
        try:
            self.pending.put_nowait((method, *arguments))
        except queue.Full:
            self.report_failure(
                f"{MAX_PENDING_CALLS:,} records wait to be sent, new ones are dropped"
            )

    def close(self, seconds: float) -> None:
        self.call("close")
        try:
            self.pending.put_nowait(None)
            self.thread.join(seconds)
        except queue.Full:
            return  # the full queue has been reported already
        if self.thread.is_alive():
            logger.warning(
                "logger=%s did not finish within %.0f s; its last records may be missing",
                self.name,
                seconds,
            )


class LoggerGroup:
    """All loggers of a run: each method calls the method of that name of every logger. A failure
    never ends a training.

    Nothing is recorded before `start`. A launch does not call `start` if nothing is left to train.
    On ranks other than 0 the group is empty. Use as a context manager: leaving it closes all
    loggers.
    """

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self.loggers = loggers
        self.calls: list[LoggerCalls] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for one in self.calls:
            one.close(CLOSE_SECONDS if error is None else FAILURE_CLOSE_SECONDS)

    def start(self, step: int) -> None:
        for name, one in self.loggers.items():
            self.calls.append((BackgroundCalls if one.in_background else LoggerCalls)(name, one))
        self._call("start", step)

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        self._call("scalars", values, step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        self._call("image", tag, png, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._call("text", tag, text, step)

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        self._call("hparams", config, results)

    def _call(self, method: str, *arguments: Any) -> None:
        for one in self.calls:
            one.call(method, *arguments)


def build_loggers(configs: Iterable[LoggerConfig], run_dir: Path) -> LoggerGroup:
    """Return the loggers that `configs` choose, writing to `run_dir`."""
    return LoggerGroup(
        {
            config.name: registry.build("logger", config, run_dir, returns=Logger)
            for config in configs
        }
    )


def read_id(run_dir: Path) -> str:
    """Return the id in the file ``run_id``, created if missing, that all launches share."""
    path = run_dir / "run_id"
    run_id = path.read_text(errors="replace").strip() if path.exists() else ""
    if not run_id.isalnum():  # the file is damaged, or this is the first launch
        run_id = secrets.token_hex(8)
        replace_text(path, run_id + "\n")
    return run_id


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the config of the run in `run_dir`."""
    return yaml.safe_load((run_dir / "config.yaml").read_text())


def import_client(package: str, config: LoggerConfig) -> Any:
    """Return the module of a logger's optional `package`; ConfigError if it is not installed or
    cannot be imported.

    Call this in the constructor, in the main thread: two threads that import at the same time may
    wait for each other.
    """
    fix = f"pip install 'ddp_trainer[{config.name}]'"
    try:
        module = import_module(package)
    except Exception as error:  # a module may raise anything
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        broken = "" if is_missing else f", which cannot be imported ({cause})"
        raise ConfigError(f"logger={config.name} needs {package}{broken}: {fix}") from error
    # A folder with the package's name, such as wandb/ of another program's run, is imported as a
    # module without a file.
    require(module.__file__ is not None, f"logger={config.name} needs {package}: {fix}")
    return module
