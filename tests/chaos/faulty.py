"""The command line with one fault: FAULT=what:rank:step, done to that rank just before it takes that step."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor

from ddp_trainer.__main__ import main
from ddp_trainer.trainer import Trainer

WHAT, RANK, STEP = os.environ["FAULT"].split(":")
take_step = Trainer.train_step


def faulty_step(self: Trainer, images: Tensor, labels: Tensor) -> Tensor:
    if self.world.rank == int(RANK) and self.step == int(STEP):
        match WHAT:
            case "raise":
                raise RuntimeError("boom in the worker")
            case "kill" | "stop" | "terminate":
                number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}[WHAT]
                os.kill(os.getpid(), number)
            case "nan":
                images = images * float("nan")
            case "flip":
                with torch.no_grad():
                    bits = next(self.model.parameters()).view(-1).view(torch.int32)
                    bits[3] ^= 1 << 12
    return take_step(self, images, labels)


Trainer.train_step = faulty_step
main()
