"""A SLURM job that loses a node: it is requeued, or goes on without the node."""

from typing import Any

import pytest
from processes import PACING, launch
from runs import assert_bitwise, read_summary, trained_state

from cluster.jobs import Jobs
from cluster.slurm import until
from cluster.test_lost_nodes import WORDS, paced
from ddp_trainer.tools.verify import find_damage

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("number", [0, 1])
def test_the_loss_of_a_node_loses_nothing(
    jobs: Jobs, undisturbed: dict[str, Any], number: int
) -> None:
    """Node 0 runs the batch script and rank 0's store, node 1 only its rank."""
    job = jobs.submit_long()
    jobs.until_it_trains(job, "run")
    node = jobs.slurm.run(
        "scontrol", "show", "hostnames", jobs.slurm.show(job)[0]["NodeList"]
    ).split()[number]
    jobs.slurm.kill_node(node)
    try:
        jobs.finish(job)
    finally:
        jobs.slurm.start_node(node)
        until(lambda: jobs.slurm.node_state(node) == "IDLE", f"{node} is back", deadline=120)
    assert jobs.slurm.show(job)[0]["Restarts"] == "1"
    assert_bitwise(trained_state(jobs.folder / "run"), undisturbed)
    assert not any(find_damage(jobs.folder / "run").values())


@pytest.mark.fault("a node of a SLURM job with --no-kill is lost and comes back")
def test_a_job_goes_on_without_a_node_and_takes_it_in_again(jobs: Jobs) -> None:
    words = (*WORDS, "epochs=8")
    done = launch(*words, f"output_dir={jobs.folder}", "name=whole", deadline=300)
    assert done.code == 0, done.output
    slurm = jobs.slurm
    is_slow = jobs.folder / "slow"
    job = jobs.submit(
        *words,
        *paced(is_slow),
        "name=run",
        options=("--nodes=3", "--no-kill"),
        DDP_TRAINER_MIN_NODES="1",
        **PACING,
    )

    def news(text: str) -> None:
        until(
            lambda: text in slurm.output(job), text, deadline=180, report=lambda: slurm.output(job)
        )

    news("epoch 1/8")
    is_slow.touch()
    node = slurm.run("scontrol", "show", "hostnames", slurm.show(job)[0]["NodeList"]).split()[1]
    slurm.kill_node(node)
    try:
        news("was lost at step")
        news("will join in its place")
    finally:
        slurm.start_node(node)
    news("rank 1 on")
    news("joined at step")
    is_slow.unlink()
    jobs.finish(job)
    assert slurm.show(job)[0]["Restarts"] == "0"
    assert not slurm.run("squeue", "--noheader")
    run, whole = (read_summary(jobs.folder / name) for name in ("run", "whole"))
    assert [ranks for _, ranks in run["ranks_by_step"]] == [3, 2, 3]
    assert run["weights_sha256"] == whole["weights_sha256"]
