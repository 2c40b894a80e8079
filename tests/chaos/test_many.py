"""Many launches, many ranks: what goes wrong one time in five, or only in a crowd."""

from pathlib import Path

import pytest
from conftest import trials
from processes import launch, run_command, torchrun
from runs import TINY, read_summary

LAUNCHES = trials(5, full=10)
RANKS = trials(16, full=32)


@pytest.mark.fault("no fault: two ranks launched, and each exits with 0", times=LAUNCHES)
@pytest.mark.timeout(60 * LAUNCHES)
def test_launches_in_a_row_exit_0(tmp_path: Path) -> None:
    words = ["-m", "ddp_trainer", *TINY, f"output_dir={tmp_path}"]
    # new processes, because forked ranks skip the end of the interpreter
    codes = [run_command([*torchrun(2), *words, f"name={n}"]).code for n in range(LAUNCHES)]
    assert codes == [0] * LAUNCHES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_ranks_train_and_exit_0(tmp_path: Path) -> None:
    """32 ranks need 13 GB: a rank costs about 390 MB of its own memory."""
    overrides = (
        "model=lenet",
        "data=digits",
        "precision=fp32",
        "max_steps=3",
        f"output_dir={tmp_path}",
        "name=many",
    )
    done = launch(*overrides, ranks=RANKS, deadline=500)
    assert done.code == 0, done.output
    summary = read_summary(tmp_path / "many")
    assert (summary["world_size"], summary["steps"], summary["eval/count"]) == (RANKS, 3, 355)
