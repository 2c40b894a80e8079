"""The allocator reuses the memory that a step frees; imports run without garbage collection."""

import sys

from conftest import run_command

PROGRAM = """
import resource, sys
import torch
from ddp_trainer.distributed.memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for mebibytes in range(1, 31):  # each larger than all before, because glibc adapts its threshold to freed blocks
    torch.ones(mebibytes * 2**18)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    done = run_command([sys.executable, "-c", PROGRAM, mode])
    assert done.code == 0, done.output
    return int(done.output.split()[-1])


def test_freed_memory_is_not_faulted_in_again() -> None:
    assert 3 * page_faults("keep") < page_faults("default")


IMPORTS = """
import gc, sys
from ddp_trainer.distributed.memory import disable_gc

with disable_gc():
    import torch
assert gc.isenabled()
frozen = gc.get_freeze_count()
with disable_gc():
    cycle = []
    cycle.append(cycle)
    assert not gc.isenabled()
print(frozen, gc.get_freeze_count())
"""


def test_only_the_import_of_torch_freezes_objects() -> None:
    done = run_command([sys.executable, "-c", IMPORTS])
    assert done.code == 0, done.output
    frozen, later = map(int, done.output.split())
    assert later <= frozen > 100_000
