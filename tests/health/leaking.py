"""The command line, with a rank that keeps memory in each epoch, LEAKING=rank:MiB, or fails,
FAILING=rank:step.
"""

import os
from typing import Any

from ddp_trainer.__main__ import main
from ddp_trainer.distributed.environment import end_with_launcher

end_with_launcher()  # before torch is imported, which takes a while

from ddp_trainer.training import loop  # noqa: E402
from ddp_trainer.training.run import TrainingRun  # noqa: E402
from ddp_trainer.training.step import TrainStep  # noqa: E402

rank = os.environ["RANK"]
leak = os.environ.get("LEAKING", ":0")
failing = os.environ.get("FAILING", ":0")
kept: list[bytearray] = []
begin_epoch = loop.begin_epoch
take_step = TrainStep.__call__


def leaking_epoch(run: TrainingRun) -> None:
    kept.append(bytearray(b"x" * int(leak.split(":")[1]) * 2**20))
    begin_epoch(run)


def failing_step(self: TrainStep, *batch: Any) -> Any:
    if self.count + 1 == int(failing.split(":")[1]):
        raise RuntimeError("on purpose")
    return take_step(self, *batch)


if leak.startswith(rank):
    loop.begin_epoch = leaking_epoch
if failing.startswith(rank):
    TrainStep.__call__ = failing_step  # type: ignore
main()
