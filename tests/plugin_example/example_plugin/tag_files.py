"""A text file for each tag in ``tags/`` of the run directory, with lines of ``step value``."""

from collections.abc import Mapping
from pathlib import Path

from ddp_trainer import Logger
from example_plugin import TagFilesConfig


class TagFilesLogger(Logger):
    def __init__(self, config: TagFilesConfig, run_dir: Path) -> None:
        self.digits = config.digits
        self.folder = run_dir / "tags"

    def start(self, step: int) -> None:
        self.folder.mkdir(exist_ok=True)
        # remove what a killed launch wrote after step `step`
        for path in self.folder.glob("*.txt"):
            kept = [line for line in path.read_text().splitlines() if int(line.split()[0]) <= step]
            path.write_text("".join(f"{line}\n" for line in kept))

    def scalars(self, values: Mapping[str, float | str], step: int) -> None:
        for tag, value in values.items():
            text = value if isinstance(value, str) else f"{value:.{self.digits}g}"
            with (self.folder / f"{tag.replace('/', '-')}.txt").open("a") as file:
                file.write(f"{step} {text}\n")
