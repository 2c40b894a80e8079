"""The state of a run in a checkpoint."""

from ddp_trainer.checkpoint.file import State
from ddp_trainer.models.weights import load_state, tensors_of
from ddp_trainer.sync.buffers import averaged_statistics, restore_buffers
from ddp_trainer.training.run import TrainingRun


class RunState:
    """Saves and restores a `TrainingRun`; both methods are collective."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run

    def state_dict(self) -> State:
        """Return the state from which training resumes; parameters are not copied."""
        run = self.run
        step = run.train_step
        with averaged_statistics(step.models, run.world) as own:
            model, *averages = (tensors_of(model) for model in step.models)
        observers = {name: one.state_dict() for name, one in run.events.observers.items()}
        return {
            "model": model,
            "ema": averages[0] if averages else None,
            **step.state_dict(),
            "epoch": run.step // run.steps_per_epoch,
            "samples_seen": run.step * run.config.global_batch_size,
            "config": run.config_tree,
            "best_top1": run.progress.best_top1,
            "class_names": list(run.loaders.datasets.class_names),
            "preprocessing": run.loaders.preprocessing,
            "data_fingerprint": run.loaders.datasets.fingerprint,
            "train_samples": run.loaders.sampler.length,
            "statistics_by_rank": run.world.all_gather(own),
            "progress": run.progress.state_dict(),
            "observers": {name: state for name, state in observers.items() if state},
        }

    def load_state_dict(self, state: State) -> None:
        """Restore `state`, saved by any number of ranks."""
        run = self.run
        models = run.train_step.models
        for model, saved in zip(models, (state["model"], state.get("ema")), strict=False):
            load_state(model, saved or {})
        run.train_step.load_state_dict(state)
        statistics = state["statistics_by_rank"]
        if len(statistics) == run.world.world_size:
            restore_buffers(models, statistics[run.world.rank])
        run.progress.load_state_dict(state["progress"], best_top1=state["best_top1"])
        if state["config"]["observer"] != run.config_tree["observer"]:
            # The user has changed what may end the training, so it goes on.
            run.progress.stop_reason = None
        for name, saved in state["observers"].items():
            if name in run.events.observers:
                run.events.observers[name].load_state_dict(saved)
