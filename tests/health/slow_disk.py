"""The command line on a disk that takes a second for each PART bytes of a checkpoint. With
FAIL=step, rank 1 fails after that step.
"""

import os
import time
from dataclasses import dataclass

from ddp_trainer.__main__ import main
from ddp_trainer.distributed.environment import end_with_launcher

end_with_launcher()  # before torch is imported, which takes a while

from ddp_trainer import Observer, ObserverConfig, TrainingRun, register_observer  # noqa: E402
from ddp_trainer.checkpoint import file  # noqa: E402

fdatasync = os.fdatasync


def slow(descriptor: int) -> None:
    time.sleep(1)
    fdatasync(descriptor)


@dataclass(kw_only=True)
class FailingConfig(ObserverConfig):
    name: str = "failing"


@register_observer("failing", FailingConfig)
class Failing(Observer):
    def __init__(self, config: FailingConfig) -> None:
        self.step = int(os.environ["FAIL"])

    def on_step(self, run: TrainingRun) -> None:
        if (run.world.rank, run.step) == (1, self.step):
            raise RuntimeError("rank 1 fails")


file.SYNC_BYTES = int(os.environ["PART"])
os.fdatasync = slow
main()
