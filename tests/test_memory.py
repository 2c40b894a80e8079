"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import sys

from conftest import run_command

PROGRAM = """
import resource, sys
import torch
from ddp_trainer.memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for mebibytes in range(1, 31):  # each more than any before, so that glibc has not learnt of it
    torch.ones(mebibytes * 2**18)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    done = run_command([sys.executable, "-c", PROGRAM, mode])
    assert done.code == 0, done.output
    return int(done.output.split()[-1])


def test_freed_memory_is_not_faulted_in_again() -> None:
    assert 3 * faults("keep") < faults("leave")


IMPORTS = """
import gc, sys
from ddp_trainer.memory import without_collection

with without_collection():
    import torch
assert gc.isenabled()
frozen = gc.get_freeze_count()
with without_collection():
    cycle = []
    cycle.append(cycle)
    assert not gc.isenabled()
print(frozen, gc.get_freeze_count())
"""


def test_what_torch_leaves_is_frozen_and_nothing_after_it() -> None:
    done = run_command([sys.executable, "-c", IMPORTS])
    assert done.code == 0, done.output
    frozen, later = map(int, done.output.split())
    assert later <= frozen > 100_000
