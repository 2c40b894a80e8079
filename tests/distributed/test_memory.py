"""Memory that a step frees is reused, imports run without garbage collection, threads that wait
release their core.
"""

import sys
from pathlib import Path

import pytest
from processes import run_command
from runs import TINY


def output_of(program: str, *words: str, variables: tuple[str, ...] = ()) -> list[str]:
    unset = ["-u", "GOMP_SPINCOUNT"]  # this process may have called limit_spinning
    done = run_command(["env", *unset, *variables, sys.executable, "-c", program, *words])
    assert done.code == 0, done.output
    return done.output.split()


ALLOCATIONS = """
import gc, resource, sys
gc.disable()  # the import is faster
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


STARTS = {
    "torchrun": "import ddp_trainer.launchers.agent",
    "rank": "from ddp_trainer.__main__ import main; main()",
}
"""What a process of a training imports and does, until it has imported torch."""
COLLECTED = """
collected = {id(each) for each in gc.get_objects()}  # the frozen ones are not among them
modules = [sys.modules[name] for name in ("torch", "torch.distributed", "torch._dynamo")
           if name in sys.modules]
print(len(modules), any(id(vars(module)) in collected for module in modules))
"""


@pytest.mark.parametrize(("process", "num_modules"), [("torchrun", 2), ("rank", 3)])
def test_a_process_of_a_training_collects_no_garbage_of_imports(
    process: str, num_modules: int, tmp_path: Path
) -> None:
    program = "\n".join(("import gc, sys", STARTS[process], COLLECTED))
    output = output_of(program, *TINY, "max_steps=1", f"output_dir={tmp_path}")
    assert output[-2:] == [str(num_modules), "False"]


WAITS = """
import gc, time
from ddp_trainer.distributed.environment import limit_spinning
limit_spinning()
gc.disable()  # the import is faster
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
    assert busy_seconds("OMP_WAIT_POLICY=active") > default / 2  # the user's choice counts
