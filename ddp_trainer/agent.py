"""torchrun with an exit code to act upon: ``python -m ddp_trainer.agent [torchrun's options] -m ddp_trainer …``.

torchrun itself exits 1 whatever has failed, with a traceback of its own. This one exits 2 when the rank that failed
first has refused the user's input, and has said so; else 1, with the cause as torchrun prints it.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from ddp_trainer.command_line import USER_ERROR


def main() -> None:
    """Run torchrun, and exit with the code of the rank that failed first if that is 2, else with 1."""
    try:
        torchrun()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode == USER_ERROR:
            sys.exit(USER_ERROR)
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
