"""Nodes that are lost while the others go on: killed, without power, and started again."""

import re
from pathlib import Path

import pytest
from chaos.test_recovery import plan_of
from conftest import trials
from processes import PACE, PACING, ROOT, launch, plugins
from runs import TINY, read_summary

from cluster.namespaces import Hosts, can_make_hosts
from cluster.slurm import until
from cluster.test_nodes import Job

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not can_make_hosts(), reason="root")]

WORDS = (*TINY, "data.num_train=960", "shards=6", "recovery.silent_seconds=3")
WENT_ON = re.compile(r"rank \d on (\S+) was lost at step \d+; \d ranks? went on ([\d.]+) s later")


def paced(is_slow: Path) -> tuple[str, ...]:
    """Return overrides for a training that is slow as long as the file `is_slow` exists."""
    return (PACE, f"observer.pace.file={is_slow}")


@pytest.mark.fault("a node that is killed or has no power, while the others go on", times=2)
def test_nodes_are_lost_and_one_comes_back(hosts: Hosts, tmp_path: Path) -> None:
    words = (*WORDS, "epochs=8")
    done = launch(*words, f"output_dir={tmp_path}", "name=whole", deadline=300)
    assert done.code == 0, done.output
    is_slow = tmp_path / "slow"
    job = Job(hosts, tmp_path, *words, *paced(is_slow), count=3, min_nodes=1, **PACING)

    def news(text: str) -> None:
        until(lambda: text in job.log(0).read_text(), text, deadline=120, report=job.told)

    news("epoch 1/8")
    is_slow.touch()
    hosts.kill(2)
    news("was lost at step")
    job.nodes[2] = job.start(2)
    news("rank 2 on node2 joined")
    hosts.cut(1)
    news("rank 1 on node1 was lost")
    is_slow.unlink()
    del job.nodes[1]
    job.finish()
    summary = read_summary(job.run_dir)
    assert summary["weights_sha256"] == read_summary(tmp_path / "whole")["weights_sha256"]
    lost = {m[1]: float(m[2]) for m in WENT_ON.finditer(job.log(0).read_text())}
    assert set(lost) == {"node1", "node2"}
    assert max(lost.values()) < 10


@pytest.mark.fault("SIGKILL of a rank of one of three hosts, while the others go on", times=5)
@pytest.mark.parametrize("seed", range(trials(1, full=10)))
def test_ranks_of_three_hosts_are_killed_and_join_again(
    seed: int, hosts: Hosts, tmp_path: Path
) -> None:
    words = (*WORDS, "epochs=6")
    done = launch(*words, f"output_dir={tmp_path}", "name=whole", deadline=300)
    assert done.code == 0, done.output
    (tmp_path / "done").mkdir()
    kills = (
        "observer=[kills]",
        f"observer.kills.plan='{plan_of(seed, 3)}'",
        f"observer.kills.folder={tmp_path}/done",
    )
    environment = plugins("killing", ROOT / "tests/chaos")
    job = Job(hosts, tmp_path, *words, *kills, count=3, min_nodes=1, **environment)
    job.finish()
    assert len(list((tmp_path / "done").iterdir())) == 5
    summary = read_summary(job.run_dir)
    assert summary["weights_sha256"] == read_summary(tmp_path / "whole")["weights_sha256"]
    assert summary["rounds"] > 5 / 2  # of three ranks, two may be lost at once
