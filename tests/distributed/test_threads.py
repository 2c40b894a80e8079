"""An OpenMP thread that waits releases its core to other programs."""

import sys

from conftest import run_command

PROGRAM = """
import time
from ddp_trainer.distributed.environment import limit_spinning
limit_spinning()
import torch
torch.set_num_threads(2)
values = torch.ones(2**18)
began = time.process_time()
for _ in range(100):
    values.add_(1)  # by both threads; the second then waits for the next operation
    time.sleep(0.01)
print(time.process_time() - began)
"""


def busy_seconds(*variables: str) -> float:
    """Return the CPU time that two threads take for next to nothing in a second."""
    unset = ["-u", "GOMP_SPINCOUNT"]  # this process may have called limit_spinning
    done = run_command(["env", *unset, *variables, sys.executable, "-c", PROGRAM])
    assert done.code == 0, done.output
    return float(done.output.split()[-1])


def test_a_thread_that_waits_releases_its_core() -> None:
    default = busy_seconds("GOMP_SPINCOUNT=300000")  # that of libgomp
    assert 4 * busy_seconds() < default
    assert 4 * busy_seconds("OMP_WAIT_POLICY=passive") < default
    assert busy_seconds("OMP_WAIT_POLICY=active") > default / 2  # the user's choice counts
