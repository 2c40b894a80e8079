"""Read the files of a run directory. Any file may be missing, damaged, huge or written by a
stranger.
"""

import base64
import json
import math
import os
import reprlib
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ddp_trainer.config.errors import USER_ERRORS, TransientError

MB = 2**20
MAX_LINE = MB
"""Maximum bytes of a line of a text file; a longer line is read as several lines."""
MAX_TEXT = 500
"""Maximum characters of a name or a path that the report shows."""
SHORT = reprlib.Repr()
SHORT.maxlevel = 2  # because a few lines of YAML aliases make deeply nested lists
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Picture(NamedTuple):
    """A PNG file: its size in pixels, and its content as a data URI."""

    width: int
    height: int
    uri: str


class RunFiles:
    """Reads files in `folder`. For a file that cannot be used, a sentence is added to the list
    `problems`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def read_bytes(self, name: str, *, limit: int) -> bytes | None:
        """Return the content of a file; None if it is missing, not a regular file, unreadable or
        above `limit` bytes.

        Raises:
            TransientError: the file system does not answer.
        """
        path = self.folder / name
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return None
            with open(path, "rb") as file:
                data = file.read(limit + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            return self.unreadable(name, error)
        if len(data) > limit:
            self.problems.append(f"{name} is larger than {limit // MB} MiB and was left out.")
            return None
        return data

    def read_lines(self, name: str, *, limit: int) -> Iterator[str]:
        """Yield the lines of a text file, `limit` bytes at most in total; no lines if the file is
        missing.
        """
        path = self.folder / name
        size = 0
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return
            with open(path, "rb") as file:
                while line := file.readline(MAX_LINE):
                    size += len(line)
                    if size > limit:
                        self.problems.append(
                            f"{name} is larger than {limit // MB} MiB: the rest was left out."
                        )
                        return
                    yield line.decode(errors="surrogateescape")
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable(name, error)

    def read_records(self, name: str, *, limit: int) -> Iterator[dict[str, Any] | None]:
        """Yield the dict in each line of a JSON Lines file; None for a line that is damaged or has
        no step.

        limit: maximum bytes that are read; later lines are left out.
        """
        for line in filter(str.strip, self.read_lines(name, limit=limit)):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield (
                record
                if isinstance(record, dict) and whole(record.get("step")) is not None
                else None
            )

    def read_object(self, name: str, kind: type) -> Any:
        """Return the value in a JSON or YAML file, a dict or list as `kind` says; empty if missing
        or damaged.
        """
        is_yaml = name.endswith(".yaml")
        data = self.read_bytes(name, limit=MB if is_yaml else 32 * MB)
        if data is None:
            return kind()
        try:
            value = (yaml.safe_load if is_yaml else json.loads)(data.decode(errors="replace"))
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
            value = None
        if not isinstance(value, kind):
            self.problems.append(f"{name} is damaged.")
            return kind()
        return value

    def read_picture(self, name: str, *, limit: int, max_side: int) -> Picture | None:
        """Return a PNG; None if it is missing, larger than `limit` bytes or `max_side` pixels a
        side, or not a PNG.
        """
        data = self.read_bytes(name, limit=limit)
        if data is None:
            return None
        size = png_size(data)
        if size is None or max(size) > max_side:
            self.problems.append(
                f"{text(name)} is not a PNG of at most {max_side} pixels a side and was left out."
            )
            return None
        return Picture(*size, f"data:image/png;base64,{base64.b64encode(data).decode()}")

    def holds(self, name: str) -> bool:
        """Return whether `name` is a relative path that stays in `folder` when symbolic links are
        followed.
        """
        try:
            folder = self.folder.resolve()
            path = (self.folder / name).resolve()
            return (
                not os.path.isabs(name)
                and ".." not in Path(name).parts
                and path.is_relative_to(folder)
            )
        except (OSError, RuntimeError, ValueError):  # a loop of links, or a NUL in the name
            return False

    def unreadable(self, name: str, error: OSError) -> None:
        """Add to `problems` that a file cannot be read; TransientError if a later attempt may
        succeed.
        """
        if error.errno not in USER_ERRORS:
            raise TransientError(
                f"{self.folder / name} cannot be read: {error.strerror or error}"
            ) from error
        self.problems.append(f"{name} cannot be read: {error.strerror}.")


def png_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a PNG; None if `data` is something else."""
    if not data.startswith(PNG_SIGNATURE) or data[12:16] != b"IHDR" or len(data) < 24:
        return None
    width, height = struct.unpack(">II", data[16:24])
    return (width, height) if width and height else None


def number(value: object) -> float | None:
    """Return `value` if it is a finite number of magnitude at most 1e300; None for
    anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return value if math.isfinite(value) else None


def whole(value: object) -> int | None:
    """Return `value` if it is an int from 0 to 2**53 - 1, which JavaScript holds exactly; else
    None.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**53 else None


def text(value: object, *, length: int = MAX_TEXT) -> str:
    """Return a value from a file as text of at most `length` characters; an empty text for None."""
    shown = value if isinstance(value, str) else "" if value is None else SHORT.repr(value)
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"
