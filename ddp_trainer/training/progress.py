"""The progress of a run: what a checkpoint holds besides the model and the state of a step."""

import time
from typing import Any

from ddp_trainer.distributed.process_group import World
from ddp_trainer.training.metrics import Evaluation, MetricSums, SampleDigest


class Progress:
    """The last evaluation, the best one, the digest of the current epoch's samples, and the time spent."""

    def __init__(self, world: World, sums: MetricSums) -> None:
        self.world, self.sums = world, sums
        self.best_top1 = 0.0
        self.evaluation = Evaluation()
        self.digest = SampleDigest(world.device)
        self.earlier_seconds, self.began = 0.0, time.perf_counter()

    def seconds(self) -> float:
        """Return the wall-clock seconds spent on this run, over all launches."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def state_dict(self) -> dict[str, Any]:
        """Return sums over ranks, and the rest as builtins. Collective: every rank must call this."""
        last = self.evaluation
        return {
            "digest": self.world.all_reduce(self.digest.vector.clone()),
            "window": self.world.all_reduce(self.sums.vector.clone()),
            "seconds": self.seconds(),
            "evaluation": [last.loss, last.top1, last.count],
        }

    def load_state_dict(self, state: dict[str, Any], *, best_top1: float) -> None:
        """Restore what `state_dict` returned. Rank 0 restores the sums over all ranks."""
        self.best_top1 = best_top1
        if self.world.is_main:
            self.digest.vector += state["digest"].to(self.world.device)
            self.sums.vector += state["window"].to(self.world.device)
        self.earlier_seconds = state["seconds"]
        loss, top1, count = state["evaluation"]
        self.evaluation = Evaluation(loss=loss, top1=top1, count=count)
