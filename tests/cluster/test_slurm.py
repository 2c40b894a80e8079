"""launch/slurm.sbatch on a real cluster."""

from __future__ import annotations

from cluster.slurm import SlurmCluster


def test_nodes_of_the_cluster_are_tracked_apart(slurm: SlurmCluster) -> None:
    job = slurm.submit("--nodes=2", "--wrap", "srun --ntasks-per-node=1 grep freezer /proc/self/cgroup")
    assert slurm.wait(job) == "COMPLETED"
    groups = [line.partition("/")[2] for line in slurm.output(job).splitlines()]
    assert sorted(groups) == [f"slurm_{node}/uid_0/job_{job}/step_0" for node in slurm.nodes[:2]]
