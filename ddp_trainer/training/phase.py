"""The phases of a training, by which step times are measured and failures are reported."""

from enum import Enum


class Phase(Enum):
    """A phase of a training, with its name in messages and its name in the tags of step times."""

    def __init__(self, text: str, tag: str) -> None:
        self.text = text
        """The name in messages."""
        self.tag = tag
        """The name in tags such as ``time/data_wait_ms``; several phases may have the same tag."""

    start = ("start", "other")
    compilation = ("compilation", "other")
    data = ("data", "data_wait")
    forward = ("forward", "forward_backward")
    backward = ("backward", "forward_backward")
    gradient_sync = ("gradient sync", "communication")
    check = ("check", "other")
    optimizer = ("optimizer", "optimizer")
    between_steps = ("between steps", "other")
    control_point = ("control point", "other")
    evaluation = ("evaluation", "other")
    save = ("save", "other")
    end = ("end", "other")


TAGS = tuple(dict.fromkeys(phase.tag for phase in Phase))
"""The values of `Phase.tag`, each of them once."""
OWN_WORK = (Phase.data, Phase.forward, Phase.backward, Phase.optimizer, Phase.between_steps)
"""The phases in which a rank does not wait for other ranks."""
MAY_TAKE_ANY_TIME = (Phase.compilation, Phase.end)
"""The phases in which a rank without progress is not a failure.

They have no time limit, because torch.compile waits for compilers, and a run waits at its end for
files and loggers.
"""
