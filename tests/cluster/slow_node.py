"""In place of Python on the nodes: the node check of one node, SLOW_NODE, runs for four fifths of
the time.

Each node has a core of its own for its check, because the nodes of the test cluster share a
machine.
"""

import os
import signal
import subprocess
import sys
import time

words = [sys.executable, *sys.argv[1:]]
if "node-check" not in words:
    os.execv(sys.executable, words)
cores = sorted(os.sched_getaffinity(0))
core = str(cores[int(os.environ["SLURM_NODEID"]) % len(cores)])
with subprocess.Popen(["taskset", "--cpu-list", core, *words]) as check:
    while check.poll() is None:
        if os.environ["SLURMD_NODENAME"] == os.environ["SLOW_NODE"]:
            check.send_signal(signal.SIGSTOP)
            time.sleep(0.01)
            check.send_signal(signal.SIGCONT)
        time.sleep(0.04)
sys.exit(check.returncode)
