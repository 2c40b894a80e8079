"""Read the files of a directory that may be missing, damaged or written by a stranger."""

import base64
import json
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ddp_trainer.config.errors import USER_ERRORS, TransientError
from ddp_trainer.tools.report.values import text, whole

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Picture(NamedTuple):
    """A PNG file: its size in pixels, and its content as a data URI."""

    width: int
    height: int
    uri: str


class FolderReader:
    """Reads files in `folder`; a file that cannot be used adds a sentence to `problems`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def read_bytes(self, name: str) -> bytes | None:
        """Return the content of a regular file; None if it is missing or unreadable.

        Raises:
            TransientError: the file system does not answer.
        """
        path = self.folder / name
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return None
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self.add_unreadable(name, error)

    def read_json_lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the dicts with a step in a JSON Lines file; other lines are counted as damaged."""
        num_damaged = 0
        for line in filter(None, (self.read_bytes(name) or b"").splitlines()):
            record = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
            if isinstance(record, dict) and whole(record.get("step")) is not None:
                yield record
            else:
                num_damaged += 1
        if num_damaged:
            self.problems.append(f"{name} has damaged lines, which were left out: {num_damaged:,}.")

    def read_object(self, name: str, kind: type) -> Any:
        """Return the dict or list (`kind`) in a JSON or YAML file; empty if missing or damaged."""
        data = self.read_bytes(name)
        if data is None:
            return kind()
        value = None
        load = yaml.safe_load if name.endswith(".yaml") else json.loads
        with suppress(yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
            value = load(data.decode(errors="replace"))
        if not isinstance(value, kind):
            self.problems.append(f"{name} is damaged.")
            return kind()
        return value

    def read_picture(self, name: str) -> Picture | None:
        """Return a PNG inside the folder; None if it is missing or not a PNG."""
        data = self.read_bytes(name) if self.is_inside(name) else None
        if data is None:
            return None
        size = png_size(data)
        if size is None:
            self.problems.append(f"{text(name)} is not a PNG and was left out.")
            return None
        return Picture(*size, f"data:image/png;base64,{base64.b64encode(data).decode()}")

    def is_inside(self, name: str) -> bool:
        """Return whether the relative path `name` stays in the folder, also by symbolic links."""
        try:
            path = (self.folder / name).resolve()
            is_relative = not os.path.isabs(name) and ".." not in Path(name).parts
            return is_relative and path.is_relative_to(self.folder.resolve())
        except (OSError, RuntimeError, ValueError):  # a loop of links, or a NUL in the name
            return False

    def add_unreadable(self, name: str, error: OSError) -> None:
        """Add that a file cannot be read; TransientError if a later attempt may succeed."""
        reason = f"cannot be read: {error.strerror}"
        if error.errno not in USER_ERRORS:
            raise TransientError(f"{self.folder / name} {reason}") from error
        self.problems.append(f"{text(name)} {reason}.")


def png_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a PNG; None if `data` is something else."""
    if not data.startswith(PNG_SIGNATURE) or data[12:16] != b"IHDR" or len(data) < 24:
        return None
    width, height = struct.unpack(">II", data[16:24])
    return (width, height) if width and height else None
