"""Threads: one that has nothing to do leaves its core to others."""

from __future__ import annotations

import sys

from conftest import run_command

PROGRAM = """
import time
import ddp_trainer, torch
torch.set_num_threads(2)
values = torch.ones(2**18)
began = time.process_time()
for _ in range(100):
    values.add_(1)  # by both threads; the second then waits for more
    time.sleep(0.01)
print(time.process_time() - began)
"""


def busy_seconds(*variables: str) -> float:
    """Return the CPU time that two threads take for next to nothing in a second."""
    forget = ["-u", "GOMP_SPINCOUNT"]  # which importing us has set in this process
    done = run_command(["env", *forget, *variables, sys.executable, "-c", PROGRAM])
    assert done.code == 0, done.output
    return float(done.output.split()[-1])


def test_a_thread_that_waits_leaves_its_core_to_others() -> None:
    longest = busy_seconds("GOMP_SPINCOUNT=300000")  # as it is without us
    assert 4 * busy_seconds() < longest
    assert 4 * busy_seconds("OMP_WAIT_POLICY=passive") < longest
    assert busy_seconds("OMP_WAIT_POLICY=active") > longest / 2  # who asks for it has it
