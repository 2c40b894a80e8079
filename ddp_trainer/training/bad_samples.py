"""Samples that could not be read: the run lists those of all ranks in a file, or ends."""

import json
import logging
from pathlib import Path

from ddp_trainer.config.errors import ConfigError, printable
from ddp_trainer.distributed.world import World
from ddp_trainer.files import replace_text

logger = logging.getLogger(__name__)

FILE = "bad_images.jsonl"


class BadSamples:
    """The samples that any rank could not read, listed in bad_images.jsonl."""

    def __init__(
        self, own: list[tuple[str, str]], world: World, *, are_skipped: bool, run_dir: Path
    ) -> None:
        """own: this rank's readers append the name and reason of each bad sample to it.

        are_skipped: whether the run goes on without them (data.on_bad_image=skip).
        """
        self.own = own
        self.world = world
        self.are_skipped = are_skipped
        self.path = run_dir / FILE
        self.reasons: dict[str, str] = {}

    def gather(self) -> None:
        """Exchange new bad samples between ranks; rank 0 adds them to the file. Collective.

        Raises:
            ConfigError: on all ranks, if any rank has a new bad sample and they are not skipped.
        """
        new = self.own[:]
        del self.own[: len(new)]  # readers may have appended more
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
        """Add new bad samples to the file; a failure, as on a full disk, only logs a warning."""
        try:
            lines = self.path.read_text().splitlines() if self.path.exists() else []
            known = {line["path"]: line["reason"] for line in map(json.loads, lines)}
            entries = sorted((known | self.reasons).items())
            replace_text(
                self.path, "".join(json.dumps({"path": p, "reason": r}) + "\n" for p, r in entries)
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s was not written: %s", self.path, error)
