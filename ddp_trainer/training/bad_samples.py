"""Samples that could not be read: the run lists the bad samples of all ranks in a file, or ends
with an error.
"""

import json
import logging
from pathlib import Path

from ddp_trainer.config.data import OnBadImage
from ddp_trainer.config.errors import ConfigError, printable
from ddp_trainer.distributed.process_group import World
from ddp_trainer.files import replace_text

logger = logging.getLogger(__name__)

FILE = "bad_images.jsonl"


class BadSamples:
    """The samples that any rank could not read (bad samples), listed in bad_images.jsonl in the run
    directory.
    """

    def __init__(
        self, own: list[tuple[str, str]], world: World, *, on_bad_image: OnBadImage, run_dir: Path
    ) -> None:
        """Keep the list `own`, to which this rank's data readers append the name and reason of each
        new bad sample.
        """
        self.own = own
        self.world = world
        self.on_bad_image = on_bad_image
        self.path = run_dir / FILE
        self.reasons: dict[str, str] = {}

    def gather(self) -> None:
        """Exchange new bad samples between ranks; rank 0 adds them to bad_images.jsonl. Every rank
        must call this.

        Raises:
            ConfigError: on all ranks, if on_bad_image=error and any rank has a new bad sample.
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
        if self.on_bad_image is OnBadImage.error:
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
        """Add new bad samples to bad_images.jsonl. If this fails, for example on a full disk, only
        log a warning.
        """
        try:
            lines = self.path.read_text().splitlines() if self.path.exists() else []
            known = {line["path"]: line["reason"] for line in map(json.loads, lines)}
            entries = sorted((known | self.reasons).items())
            replace_text(
                self.path, "".join(json.dumps({"path": p, "reason": r}) + "\n" for p, r in entries)
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s was not written: %s", self.path, error)
