"""The phases of a training: what a rank does now, for step times and reports of failures."""

from enum import Enum


class Phase(Enum):
    """A phase of a training. The value is its name in messages."""

    start = "start"
    compilation = "compilation"
    data = "data"
    forward = "forward"
    backward = "backward"
    gradient_sync = "gradient sync"
    check = "check"
    optimizer = "optimizer"
    between_steps = "between steps"
    control_point = "control point"
    evaluation = "evaluation"
    save = "save"
    end = "end"

    @property
    def tag(self) -> str:
        """The name of the phase in tags such as ``time/data_wait_ms``; several phases share one."""
        return TAGS.get(self, "other")

    @property
    def is_own_work(self) -> bool:
        """Whether a rank does not wait for other ranks in this phase."""
        return self in OWN_WORK

    @property
    def may_take_any_time(self) -> bool:
        """Whether a rank without progress in this phase is no failure.

        torch.compile waits for compilers, and an ending run for files and loggers.
        """
        return self in (Phase.compilation, Phase.end)


TAGS = {
    Phase.data: "data_wait",
    Phase.forward: "forward_backward",
    Phase.backward: "forward_backward",
    Phase.gradient_sync: "communication",
    Phase.optimizer: "optimizer",
}
OWN_WORK = (Phase.data, Phase.forward, Phase.backward, Phase.optimizer, Phase.between_steps)
