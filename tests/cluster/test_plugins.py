"""The example plug-in under SLURM: the job's environment takes it to all nodes."""

import pytest
from processes import succeed
from runs import assert_bitwise, read_summary, trained_state
from test_plugins import EXAMPLE, PLUGIN

from cluster.jobs import Jobs

pytestmark = pytest.mark.timeout(900)


def test_a_job_of_plugins_that_is_killed_ends_as_one_that_was_left_alone(jobs: Jobs) -> None:
    words = (*EXAMPLE, "epochs=30")
    succeed(*words, f"output_dir={jobs.folder}", "name=alone", ranks=2, deadline=300, **PLUGIN)
    job = jobs.submit(*words, "name=killed", **PLUGIN)
    jobs.until_it_trains(job, "killed")
    jobs.slurm.run("scancel", "--signal=KILL", f"{job}.0")
    output = jobs.finish(job)
    assert "requeueing job" in output
    assert "resumed from" in output
    assert read_summary(jobs.folder / "killed")["world_size"] == 2
    assert_bitwise(trained_state(jobs.folder / "alone"), trained_state(jobs.folder / "killed"))
