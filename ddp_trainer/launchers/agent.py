"""torchrun with two exit codes: ``python -m ddp_trainer.launchers.agent [torchrun's options] …``.

The exit code is 2 if the first rank to fail has exited with 2, because the user's input is wrong;
that rank has printed the error. For any other failure it is 1, which torchrun always uses.

This module adds ``--rdzv-backend=bound``: torchrun's static rendezvous, but its store listens on
one address only. The stores of ``--rdzv-backend=static``, ``c10d`` and ``--standalone`` listen on
all network interfaces, and the last two also execute pickles from any client.
"""

import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from ddp_trainer.config.errors import USER_ERROR
from ddp_trainer.distributed.environment import starts_incomplete
from ddp_trainer.launchers.network import JOB_KEY, address_of, listen
from ddp_trainer.runtime import disable_gc

with disable_gc():
    from torch.distributed import DistError, TCPStore
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.elastic.rendezvous import (
        RendezvousInfo,
        RendezvousParameters,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.launcher import api as launcher_api
    from torch.distributed.run import main as torchrun

    from ddp_trainer.distributed.membership import ended_key

QUIET = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.multiprocessing.spawn",
)
"""Loggers that are silenced, because they repeat that a rank has failed or node 0 has ended."""

EXIT_SECONDS = 30
"""How long an agent waits at its end for those of other nodes, of which some may be lost."""


class BoundRendezvous(StaticTCPRendezvous):
    """The rendezvous for ``--rdzv-backend=bound --rdzv-endpoint=ADDRESS:PORT``.

    In a job of several nodes, ``--rdzv-conf=rank=R`` gives the rank of this node; the default is 0.
    The store runs on node 0 and listens on ADDRESS only. In a job of one node PORT may be 0: the
    system then chooses a free port.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        # always present: torchrun sets 900 by default
        rank = int(parameters.get("rank", 0))
        timeout = int(parameters.get("timeout"))
        super().__init__(address, port, rank, parameters.max_nodes, parameters.run_id, timeout)

    def get_backend(self) -> str:
        return "bound"

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and self._store is None:
            try:
                server = listen(address_of(self.master_addr), self.master_port)
            except OSError as error:
                sys.exit(
                    "error: torchrun's store cannot listen on"
                    f" {self.master_addr}:{self.master_port} ({os.strerror(error.errno or 0)}):"
                    " choose another port, or end the program that uses it"
                )
            self.master_port = server.getsockname()[1]
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=self.timeout,
                multi_tenant=True,
                wait_for_workers=not starts_incomplete(),
                master_listen_fd=server.detach(),
            )
            self._store.set(f"{JOB_KEY}/{self.run_id}", "")
        return super().next_rendezvous()


class Agent(LocalElasticAgent):
    """torchrun's agent, which starts the ranks of this node again only if a signal has ended them.

    A rank that was killed may join a training that goes on; one that exits by itself has failed.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, exit_barrier_timeout=EXIT_SECONDS, **options)

    def _monitor_workers(self, worker_group: Any) -> Any:  # type: ignore[override]
        result = super()._monitor_workers(worker_group)  # type: ignore[call-arg]
        for failure in result.failures.values():
            if failure.exitcode >= 0:
                self._remaining_restarts = 0
            else:
                self._report_end(failure.pid)
        if starts_incomplete() and self._remaining_restarts < worker_group.spec.max_restarts:
            # The rank was started again, and would wait for a store that has ended with the job.
            self._store_of_job.check([JOB_KEY])
        return result

    @property
    def _store_of_job(self) -> Any:
        return self._worker_group.spec.rdzv_handler._store  # type: ignore[attr-defined]

    def _report_end(self, pid: int) -> None:
        """Report the end of a process to the ranks of other hosts, which cannot see it."""
        with suppress(DistError):  # torchrun's process on node 0 has ended
            self._store_of_job.set(ended_key(socket.gethostname(), pid), "")


def error_text(failure: ProcessFailure) -> str:
    """Return the text of the failed rank's error file; "" if the rank has written none."""
    message: Any = failure.message
    return message["extraInfo"]["py_callstack"] if isinstance(message, dict) else ""


def root_cause(rank: int, failure: ProcessFailure) -> str:
    """Return one line on the cause of a failure; "error: " is left out if a rank has printed it."""
    if text := error_text(failure):
        lines = text.splitlines()
        cause = [line for line in lines[:2] if not line.startswith("last good checkpoint")]
        return f"error: {lines[-1] if text.startswith('Traceback') else ': '.join(cause)}"
    if failure.exitcode < 0:
        return f"error: rank {rank} was ended by a signal ({failure.message})"
    return (
        f"rank {rank} exited with code {failure.exitcode}; see the error that it, or a rank of"
        " another node, printed"
    )


def prepare_torchrun() -> None:
    """Register `BoundRendezvous` with torchrun, and silence the loggers in `QUIET`."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("bound", BoundRendezvous)
    launcher_api.LocalElasticAgent = Agent  # type: ignore[misc]


def main() -> None:
    """Run torchrun; exit with 2 if the first failed rank exited with 2, else 1 on a failure."""
    prepare_torchrun()
    # because training must continue when the terminal is closed
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        torchrun(["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT", *sys.argv[1:]])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == USER_ERROR:
            sys.exit(USER_ERROR)
        if error_text(failure):
            print(error, file=sys.stderr)
        sys.exit(root_cause(rank, failure))
    except DistError as error:
        sys.exit(
            "error: torchrun's store on node 0 does not answer, see node 0:"
            f" {str(error).splitlines()[0]}"
        )


if __name__ == "__main__":
    main()
