"""The state of a run in a checkpoint."""

from typing import Any

import torch

from ddp_trainer.checkpoint.file import State, outline_of
from ddp_trainer.checkpoint.store import best_of
from ddp_trainer.models.weights import load_state, tensors_of
from ddp_trainer.sync.buffers import averaged_statistics, restore_buffers
from ddp_trainer.training.run import ObserverError, TrainingRun


class RunState:
    """Saves and restores a `TrainingRun`; both methods are collective."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run

    def state_dict(self) -> State:
        """Return the state from which training resumes; its parameters are those of the model."""
        run = self.run
        step = run.train_step
        with averaged_statistics(step.models, step.buffer_world) as rank_statistics:
            model_tensors, *averages = [tensors_of(model) for model in step.models]
        observers = run.events.emit("state_dict")
        for name, state in observers.items():
            check_observer_state(name, state)
        return {
            "model": model_tensors,
            "ema": averages[0] if averages else None,
            **step.state_dict(),
            "epoch": run.step // run.steps_per_epoch,
            "config": run.config_tree,
            **run.progress.best.state_dict(),
            "class_names": list(run.loaders.datasets.class_names),
            "eval_split": run.loaders.datasets.eval_split,
            "preprocessing": run.loaders.preprocessing,
            "data_fingerprint": run.loaders.datasets.fingerprint,
            "train_samples": run.loaders.sampler.length,
            "statistics_by_rank": step.buffer_world.all_gather(rank_statistics),
            "progress": run.progress.state_dict(),
            "observers": {name: state for name, state in observers.items() if state},
        }

    def load_state_dict(self, state: State) -> None:
        """Restore `state`, which the same or another number of ranks has saved."""
        run = self.run
        models = run.train_step.models
        for model, saved in zip(models, (state["model"], state.get("ema")), strict=False):
            load_state(model, saved or {})
        run.train_step.load_state_dict(state)
        # BatchNorm's statistics differ between ranks. At another world size, all ranks keep the
        # saved mean.
        statistics = state["statistics_by_rank"]
        ranks = run.train_step.buffer_world
        if len(statistics) == ranks.world_size:
            restore_buffers(models, statistics[ranks.rank])
        run.progress.load_state_dict(state["progress"], best=best_of(state))
        if state["config"]["observer"] != run.config_tree["observer"]:
            # The observer that ended the training may now be missing or have other settings.
            run.progress.stop_reason = None
        for name, saved in state["observers"].items():
            if name in run.events.observers:
                run.events.call(name, "load_state_dict", saved)


def check_observer_state(name: str, state: Any) -> None:
    """Check that a checkpoint with `state` can be read; ObserverError if not."""
    try:
        torch.load(outline_of(state), weights_only=True)
    except Exception as error:  # the state of a plug-in may be any object
        raise ObserverError(
            f"observer={name}: state_dict must return builtins and tensors only, because a"
            " checkpoint is read without running code"
        ) from error
