"""The samples that could not be read: they are skipped and listed in a file, or the run ends."""

import json
import logging
from pathlib import Path

from ddp_trainer.config.errors import ConfigError, printable
from ddp_trainer.distributed.world import World
from ddp_trainer.files import replace_text

logger = logging.getLogger(__name__)


class BadSamples:
    """The samples that any rank could not read; bad_images.jsonl lists them if they are skipped."""

    def __init__(
        self, own: list[tuple[str, str]], world: World, *, are_skipped: bool, folder: Path
    ) -> None:
        """own: the list to which this rank's readers append name and reason of each bad sample.

        are_skipped: whether the run continues without bad samples (data.on_bad_image=skip).
        folder: the folder of the file.
        """
        self.own = own
        self.world = world
        self.are_skipped = are_skipped
        self.path = folder / "bad_images.jsonl"
        self.reasons: dict[str, str] = {}

    def gather(self) -> None:
        """Exchange new bad samples between ranks; rank 0 adds them to the file. Collective.

        Raises:
            ConfigError: on all ranks, if any rank has a new bad sample and `are_skipped` is false.
        """
        new = self.own[:]
        del self.own[: len(new)]  # not clear(), because readers append samples at the same time
        gathered = sorted(sample for part in self.world.all_gather_object(new) for sample in part)
        new_reasons = {name: reason for name, reason in gathered if name not in self.reasons}
        if not new_reasons:
            return
        self.reasons |= new_reasons
        name, reason = next(iter(new_reasons.items()))
        name = printable(name)
        others = "" if len(new_reasons) == 1 else f" (and {len(new_reasons) - 1} more images)"
        if not self.are_skipped:
            raise ConfigError(
                f"{name} cannot be read: {reason}{others}; set data.on_bad_image=skip to leave out"
                " bad images, and start the command again"
            )
        if self.world.is_main:
            self.write()
            logger.warning(
                "left out %s: %s%s; all are listed in %s", name, reason, others, self.path
            )

    def write(self) -> None:
        """Add the bad samples to the file; a failure, such as a full disk, only logs a warning."""
        try:
            lines = self.path.read_text(errors="replace").splitlines() if self.path.exists() else []
            entries = sorted((dict(filter(None, map(parse, lines))) | self.reasons).items())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(
                self.path, "".join(json.dumps({"path": p, "reason": r}) + "\n" for p, r in entries)
            )
        except OSError as error:
            logger.warning("%s was not written: %s", self.path, error)


def parse(line: str) -> tuple[str, str] | None:
    """Return name and reason of a bad sample from a line of the file; None if it is damaged."""
    try:
        entry = json.loads(line)
        sample = (entry["path"], entry["reason"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return sample if all(isinstance(part, str) for part in sample) else None
