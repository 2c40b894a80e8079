"""`Observer`, the base class of everything that watches a training."""

from collections.abc import Sequence
from typing import Any

from ddp_trainer.training.phase import Phase


class Observer:
    """Watches a training. A subclass overrides the methods that it needs; those here do nothing.

    Every rank has each observer and calls its methods in the order of registration, so that a
    method may be collective. ``run`` is the `TrainingRun`: ``run.step``, ``run.epoch``,
    ``run.model``, ``run.world``, ``run.config``, ``run.loaders``, ``run.run_dir``.
    """

    def on_start(self, run: Any) -> None:
        """Called before the first step of a launch, after a checkpoint was restored."""

    def on_phase(self, run: Any, phase: Phase) -> None:
        """Called when this rank enters a phase of a step, or another phase of the training."""

    def on_step(self, run: Any) -> None:
        """Called after each optimizer step, which `run.step` counts; ``run.batch`` is its batch."""

    def on_log(self, run: Any) -> None:
        """Called after each logged step. ``run.values`` has the values by tag so far.

        ``run.log({tag: value})`` adds values, which the loggers then record.
        """

    def on_evaluation(self, run: Any) -> None:
        """Called after each evaluation; ``run.evaluation`` and ``run.values`` have its result."""

    def on_save(self, run: Any) -> None:
        """Called after the state for a checkpoint was taken; the file is written later."""

    def on_failure(self, run: Any) -> None:
        """Called once before the job ends with a failure, for two seconds at most.

        The call may come from another thread, while the main thread is in a collective.
        """

    def on_end(self, run: Any) -> None:
        """Called after the last step, evaluation and save of a launch."""

    def rank_values(self, run: Any) -> Sequence[float]:
        """Return numbers of this rank, as many as on every other rank, before each log point.

        All ranks' numbers come with the control point's own collective: in `on_log`,
        ``run.gathered(self)`` is float64 [W, n].
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a resume, as builtins and tensors. Collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`; called before `on_start`, if a checkpoint has one."""
