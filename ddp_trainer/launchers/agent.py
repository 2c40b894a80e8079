"""torchrun with two exit codes: ``python -m ddp_trainer.launchers.agent [torchrun's options] -m
ddp_trainer …``.

It exits with 2 if the rank that failed first has exited with 2 (the user's input is wrong, and the
rank has printed the error), and with 1 for any other failure, as torchrun always does. It adds
``--rdzv-backend=bound``: torchrun's static rendezvous, with a store that listens on one address.
The stores of ``--rdzv-backend=static``, ``c10d`` and ``--standalone`` listen on all network
interfaces; those of the last two also execute pickles from any client.
"""

import logging
import os
import signal
import sys
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import main as torchrun

from ddp_trainer.config.errors import USER_ERROR
from ddp_trainer.launchers.network import address_of, listen

QUIET = ("multiprocessing.api", "agent.server.api")
"""Loggers that are silenced, because they repeat that a rank has failed or node 0 has ended."""


class BoundRendezvous(StaticTCPRendezvous):
    """The rendezvous for ``--rdzv-backend=bound --rdzv-endpoint=ADDRESS:PORT
    --rdzv-conf=rank=R,timeout=SECONDS``.

    On node 0 its store listens on ADDRESS only. In a job of one node PORT may be 0: the system
    picks a free port.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        # torchrun sets 900 by default
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
                master_listen_fd=server.detach(),
            )
        return super().next_rendezvous()


def root_cause(rank: int, failure: ProcessFailure) -> str:
    """Return a line on the cause of a failure, with "error: " unless the rank has printed it."""
    message: Any = failure.message
    if isinstance(message, dict):  # the content of the rank's error file
        lines = message["extraInfo"]["py_callstack"].splitlines()
        cause = [line for line in lines[:2] if not line.startswith("last good checkpoint")]
        return f"error: {lines[-1] if lines[0].startswith('Traceback') else ': '.join(cause)}"
    if failure.exitcode < 0:
        return f"error: rank {rank} was ended by a signal ({message})"
    return (
        f"rank {rank} exited with code {failure.exitcode}; see the error that it, or a rank of"
        " another node, printed"
    )


def prepare_torchrun() -> None:
    """Register the rendezvous, and silence the loggers, of torchrun in this process."""
    for name in QUIET:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("bound", BoundRendezvous)


def main() -> None:
    """Run torchrun; exit with 2 if the first rank to fail has done so, else with 1 if it failed."""
    prepare_torchrun()
    # so that training continues when the terminal is closed
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        torchrun(["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT", *sys.argv[1:]])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == USER_ERROR:
            sys.exit(USER_ERROR)
        if isinstance(failure.message, dict):
            print(error, file=sys.stderr)
        sys.exit(root_cause(rank, failure))
    except DistError as error:
        sys.exit(
            "error: torchrun's store on node 0 does not answer, see node 0:"
            f" {str(error).splitlines()[0]}"
        )


if __name__ == "__main__":
    main()
