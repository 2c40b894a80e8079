"""Kill one of three ranks: how long do the others pause, and which steps and samples are lost?

    python benchmarks/lost_rank.py --rounds 3

ddp_trainer with recovery.min_ranks, DDP that torchrun restarts from a checkpoint of every 50 steps,
and torchft (if it is installed) take turns on the same job, on three processes of one thread.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from peers.lost_rank_job import BATCH, NUM_STEPS

HERE = Path(__file__).parent
ROOT = HERE.parent
RANKS = 3
KILLED = 1
"""The slot of the rank that is killed."""
Line = tuple[float, int, list[int]]


def variables(folder: Path, **extra: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(HERE / "peers"), os.environ.get("PYTHONPATH", "")])
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return dict(os.environ, PYTHONPATH=path, FOLDER=str(folder), **quiet, **extra)


def start(command: list[str], folder: Path, **extra: str) -> subprocess.Popen:
    with open(folder / "output.log", "a") as log:
        return subprocess.Popen(
            command,
            env=variables(folder, **extra),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def start_ours(folder: Path) -> list[subprocess.Popen]:
    words = [
        "model=lenet",
        "data=synthetic",
        f"data.num_train={BATCH * NUM_STEPS}",
        "data.num_eval=100",
        "data.channels=1",
        "data.height=28",
        "data.width=28",
        "data.mean=[0.5]",
        "data.std=[0.25]",
        "precision=fp32",
        f"global_batch_size={BATCH}",
        "epochs=1",
        "shards=3",
        "recovery.min_ranks=1",
        "observer=[lines]",
        f"output_dir={folder}",
    ]
    extra = {"ISOLATED": "1", "NPROC": str(RANKS), "PYTHON": sys.executable}
    script = [str(ROOT / "launch/local.sh"), *words]
    return [start(script, folder, DDP_TRAINER_PLUGINS="lost_rank_observer", **extra)]


def start_restarts(folder: Path) -> list[subprocess.Popen]:
    script = str(HERE / "peers/lost_rank_ddp.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = [f"--nproc_per_node={RANKS}", "--max-restarts=3"]
    # By default, ranks that are started again find the addresses of dead ranks in the store that
    # torchrun keeps (torch 2.14.1), and end with "Gloo connectFullMesh failed".
    return [start([*torchrun, *options, script], folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")]


def start_torchft(folder: Path) -> list[subprocess.Popen]:
    spec = find_spec("torchft")
    assert spec is not None
    assert spec.origin is not None
    tool = Path(spec.origin).parents[1] / "bin/torchft_lighthouse"
    options = ["--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=1000"]
    server = start([str(tool), *options, "--bind=127.0.0.1:29714"], folder)
    time.sleep(1)
    return [server, *(start_replica(folder, slot) for slot in range(RANKS))]


def start_replica(folder: Path, slot: int) -> subprocess.Popen:
    extra = {"SLOT": str(slot), "NUM_SLOTS": str(RANKS)}
    extra["TORCHFT_LIGHTHOUSE"] = "http://127.0.0.1:29714"
    return start([sys.executable, str(HERE / "peers/lost_rank_torchft.py")], folder, **extra)


def lines(folder: Path) -> dict[tuple[int, int], list[Line]]:
    """Return the lines of each process, by slot and process id."""
    found = {}
    for path in folder.glob("*-*.txt"):
        slot, pid = map(int, path.stem.split("-"))
        rows = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 2]
        found[slot, pid] = [
            (float(moment), int(step), list(map(int, ids.split(",")))) for moment, step, ids in rows
        ]
    return found


def furthest(folder: Path) -> int:
    return max((rows[-1][1] for rows in lines(folder).values() if rows), default=0)


def measure(begin: Callable[[Path], list[subprocess.Popen]], kill_at: int) -> dict[str, float]:
    """Run the job once, kill a rank after step `kill_at`, and return what it has cost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = begin(folder)
        is_torchft = begin is start_torchft
        try:
            while furthest(folder) < kill_at:
                time.sleep(0.05)
            pid = next(pid for slot, pid in lines(folder) if slot == KILLED)
            os.kill(pid, signal.SIGKILL)
            killed_at = time.time()
            if is_torchft:  # nothing starts it again by itself
                processes.append(start_replica(folder, KILLED))
            deadline = time.time() + 240
            while furthest(folder) < NUM_STEPS and time.time() < deadline:
                time.sleep(0.2)
            time.sleep(2)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM if is_torchft else signal.SIGKILL)
                process.wait()
        return costs(lines(folder), killed_at)


def costs(by_process: dict[tuple[int, int], list[Line]], killed_at: float) -> dict[str, float]:
    rows = sorted(row for rows in by_process.values() for row in rows)
    before = max(step for moment, step, _ in rows if moment <= killed_at)
    after = [moment for moment, step, _ in rows if moment > killed_at and step > before + 1]
    steps: dict[tuple[int, int], int] = Counter()
    for process, own in by_process.items():
        for _, step, _ in own:
            steps[process[0], step] += 1
    used = Counter(sample for _, _, ids in rows for sample in ids)
    return {
        "seconds until a new step": min(after) - killed_at if after else float("nan"),
        "steps taken again": sum(count - 1 for count in steps.values()) / RANKS,
        "samples lost": BATCH * NUM_STEPS - len(used),
        "samples used twice": sum(count - 1 for count in used.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    contenders = {"ddp_trainer": start_ours, "torchrun restarts": start_restarts}
    if find_spec("torchft"):
        contenders["torchft"] = start_torchft
    results: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, begin in contenders.items():
            results[name].append(measure(begin, kill_at=130 + 37 * number))
            print(name, json.dumps(results[name][-1]), flush=True)
    for name, rows in results.items():
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(f"{name}: {json.dumps(medians)}")


if __name__ == "__main__":
    main()
