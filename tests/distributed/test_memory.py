"""Memory that a step frees is reused, imports run without garbage collection, threads that wait
release their core.
"""

import sys

from processes import run_command


def output_of(program: str, *words: str, variables: tuple[str, ...] = ()) -> list[str]:
    unset = ["-u", "GOMP_SPINCOUNT"]  # this process may have called limit_spinning
    done = run_command(["env", *unset, *variables, sys.executable, "-c", program, *words])
    assert done.code == 0, done.output
    return done.output.split()


ALLOCATIONS = """
import resource, sys
import torch
from ddp_trainer.runtime import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
# Each tensor is larger than all before, because glibc adapts its threshold to freed blocks.
for mebibytes in range(1, 31):
    torch.ones(mebibytes * 2**18)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_not_faulted_in_again() -> None:
    kept, default = (int(output_of(ALLOCATIONS, mode)[-1]) for mode in ("keep", "default"))
    assert 3 * kept < default


IMPORTS = """
import gc, sys
from ddp_trainer.runtime import disable_gc

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
    frozen, later = map(int, output_of(IMPORTS))
    assert later <= frozen > 100_000


WAITS = """
import time
from ddp_trainer.distributed.environment import limit_spinning
limit_spinning()
import torch
torch.set_num_threads(2)
values = torch.ones(2**18)
began = time.process_time()
for _ in range(50):
    values.add_(1)  # by both threads; the second then waits for the next operation
    time.sleep(0.01)
print(time.process_time() - began)
"""


def busy_seconds(*variables: str) -> float:
    """Return the CPU time that two threads take for next to nothing in half a second."""
    return float(output_of(WAITS, variables=variables)[-1])


def test_a_thread_that_waits_releases_its_core() -> None:
    default = busy_seconds("GOMP_SPINCOUNT=300000")  # that of libgomp
    assert 4 * busy_seconds() < default
    assert 4 * busy_seconds("OMP_WAIT_POLICY=passive") < default
    assert busy_seconds("OMP_WAIT_POLICY=active") > default / 2  # the user's choice counts
