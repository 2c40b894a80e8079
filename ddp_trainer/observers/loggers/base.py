"""`Logger`, the base class of all loggers, and `Loggers`, the observer that calls them."""

import json
import logging
import queue
import secrets
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from ddp_trainer.config.differences import flatten_keys
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.files import replace_text
from ddp_trainer.training.run import Observer, TrainingRun, Value
from ddp_trainer.training.summary import Status

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
FAILURE_CLOSE_SECONDS = 5.0
"""How long the end of a run waits for a logger's thread: normally, and after an exception."""
MAX_PENDING_CALLS = 10_000
"""How many calls may wait for a logger's thread; when so many wait, new calls are dropped."""


class Logger:
    """Records a run. A subclass overrides the methods that it needs; those here do nothing."""

    in_background: ClassVar[bool] = False
    """Whether another thread calls the methods, so that a slow server delays no step."""

    def start(self, step: int) -> None:
        """Prepare to record the steps after `step`; delete former records of these steps."""

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        """Record `values`, numbers or texts by tag (one is ``epoch``), at optimizer step `step`."""

    def image(self, tag: str, png: bytes, step: int) -> None:
        """Record a picture; `png` is the content of a PNG file."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Record a text in Markdown."""

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Record the final `results` with the run's `config`, a flat mapping by dotted key."""

    def flush(self) -> None:
        """Write the pending records to disk."""

    def close(self) -> None:
        """Write the pending records and close files."""


class LoggerCalls:
    """Calls the methods of one logger, in another thread if the logger is `in_background`.

    Of consecutive failures, only the first is logged, as a warning.
    """

    def __init__(self, name: str, wrapped: Logger) -> None:
        self.name = name
        self.wrapped = wrapped
        self.is_failing = False
        self.pending: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        if wrapped.in_background:
            # A daemon, because the process must be able to end while a client waits for its server.
            self.thread = threading.Thread(target=self.work, name=f"logger={name}", daemon=True)
            self.thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of the logger, or let the thread call it later."""
        if self.thread is None:
            self.call_now(method, *arguments)
        elif self.pending.qsize() < MAX_PENDING_CALLS or method == "close":
            self.pending.put((method, *arguments))
        else:
            self.report_failure(
                f"{MAX_PENDING_CALLS:,} records wait to be sent, new ones are dropped"
            )

    def work(self) -> None:
        """Make the calls in the queue, in order, up to the call of ``close``."""
        method = ""
        while method != "close":
            method, *arguments = self.pending.get()
            self.call_now(method, *arguments)

    def call_now(self, method: str, *arguments: Any) -> None:
        """Call a method now, and pass any exception except KeyboardInterrupt to `report_failure`.

        A SystemExit is passed too, because no failure of a logger may end a training.
        """
        try:
            getattr(self.wrapped, method)(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.report_failure(one_line(error))
        else:
            self.is_failing = False

    def report_failure(self, reason: str) -> None:
        """Log a warning with `reason`, unless the previous call failed too."""
        if not self.is_failing:
            logger.warning("logger=%s failed (%s); training continues", self.name, reason)
        self.is_failing = True

    def close(self, seconds: float) -> None:
        """Close the logger. If it has a thread, wait for the thread for at most `seconds`."""
        self.call("close")
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                logger.warning(
                    "logger=%s did not finish within %.0f s; its last records may be missing",
                    self.name,
                    seconds,
                )


class Loggers(Observer):
    """All loggers of a run, which get its records. No failure of a logger ends a training.

    This observer is called last, after the others have added their values. Nothing is recorded
    before `on_start`, which is not called if nothing is left to train. On ranks other than 0,
    `loggers` is empty. Use as a context manager: leaving the context closes all loggers.
    """

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self.loggers = loggers
        self.calls: list[LoggerCalls] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for calls in self.calls:
            calls.close(CLOSE_SECONDS if error is None else FAILURE_CLOSE_SECONDS)

    def start(self, step: int) -> None:
        """Start all loggers, which then record the steps after `step`."""
        for name, wrapped in self.loggers.items():
            self.calls.append(LoggerCalls(name, wrapped))
        self.call("start", step)

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of each logger."""
        for calls in self.calls:
            calls.call(method, *arguments)

    @property
    def record_images(self) -> bool:
        """Whether a logger records images: of the built-in ones, all but jsonl."""
        return any(type(part).image is not Logger.image for part in self.loggers.values())

    def on_start(self, run: TrainingRun) -> None:
        if not run.recovery.records:
            run.recovery.records_after = run.step
        self.start(run.recovery.records_after)
        for method, *arguments in run.recovery.records:
            self.call(method, *arguments)
        launch = {
            "epoch": run.epoch,
            "launch/world_size": run.world.world_size,
            "launch/steps_per_epoch": run.steps_per_epoch,
        }
        self.record(run, "scalars", launch, run.step)
        config = json.dumps(run.config_tree, indent=2)
        self.record(run, "text", "config", f"```json\n{config}\n```", run.step)

    def record(self, run: TrainingRun, method: str, *arguments: Any) -> None:
        """Call a method of each logger; the call is repeated if this rank is lost before a save."""
        self.call(method, *arguments)
        if run.recovery.is_on:
            run.recovery.records.append([method, *arguments])

    def on_log(self, run: TrainingRun) -> None:
        self.record(run, "scalars", run.values, run.step)

    on_evaluation = on_log

    def on_save(self, run: TrainingRun) -> None:
        self.call("flush")
        run.recovery.records = []
        run.recovery.records_after = run.step

    def on_end(self, run: TrainingRun) -> None:
        loss = run.evaluation.loss
        if run.status is not Status.stopped and loss is not None:
            results = {"hparam/top1": run.evaluation.top1, "hparam/loss": loss}
            if run.progress.best.top1 is not None:
                results["hparam/best_top1"] = run.progress.best.top1
            self.call("hparams", flatten_keys(run.config_tree), results)


def one_line(error: BaseException) -> str:
    """Return the type and the message of `error` as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def read_id(run_dir: Path) -> str:
    """Return the id that all launches share, from the file ``run_id``; create a missing file."""
    path = run_dir / "run_id"
    run_id = path.read_text(errors="replace").strip() if path.exists() else ""
    if not run_id.isalnum():  # the file is damaged, or this is the first launch
        run_id = secrets.token_hex(8)
        replace_text(path, run_id + "\n")
    return run_id


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the config of the run in `run_dir`."""
    return yaml.safe_load((run_dir / "config.yaml").read_text())


def import_client(package: str) -> Any:
    """Import and return `package`, which a logger needs; ConfigError if the import fails.

    Call this in the constructor, in the main thread: two threads that import at the same time may
    wait for each other.
    """
    try:
        module = import_module(package)
        if module.__file__ is None:  # a folder of that name, such as wandb/ of another run
            raise ModuleNotFoundError(name=package)
    except Exception as error:  # a module may raise anything
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        cause = "" if is_missing else f", which cannot be imported ({one_line(error)})"
        raise ConfigError(
            f"logger={package} needs {package}{cause}: pip install 'ddp_trainer[{package}]'"
        ) from error
    return module
