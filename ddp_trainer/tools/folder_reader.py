"""Read files of a directory. Each file may be missing, damaged, or written by a stranger."""

import base64
import json
import os
import reprlib
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ddp_trainer.config.errors import USER_ERRORS, TransientError
from ddp_trainer.config.run_dirs import load_yaml

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_TEXT = 500
"""Maximum characters of a name or a path."""
MAX_BYTES = 2**30
"""A larger file is not read; the records of a training with a million log points have 0.5 GiB."""
MAX_DIGITS = 12
"""Longer floats are rounded, because so many digits are measured or computed, not written."""


class ShortRepr(reprlib.Repr):
    """Returns the `repr` of a value of any size as a short text, with long floats rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2  # because a few lines of YAML aliases make deeply nested lists
        self.maxlist = 50

    def repr_int(self, x: int, level: int) -> str:
        """Return an int as text, or its size, as Python does not convert a very large one."""
        return repr(x) if abs(x) < 2**64 else f"an integer of {x.bit_length()} bits"

    def repr_float(self, value: float, level: int) -> str:
        """Return a float as written, for example 0.1, or as 0.0123457 if it is long."""
        exact = repr(value)
        return exact if len(exact) <= MAX_DIGITS else f"{value:.6g}"


SHORT = ShortRepr()


def number(value: object) -> float | None:
    """Return `value` if it is a finite number of magnitude at most 1e300, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= 1e300 else None  # nan is not <= 1e300 either


def whole(value: object) -> int | None:
    """Return `value` if it is an int from 0 to 2**53 - 1, else None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**53 else None


def text(value: object) -> str:
    """Return `value` as text of at most `MAX_TEXT` characters; "" for None."""
    shown = value if isinstance(value, str) else "" if value is None else SHORT.repr(value)
    return shown if len(shown) <= MAX_TEXT else f"{shown[: MAX_TEXT - 1]}…"


def is_record(value: dict[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl has a step."""
    return whole(value.get("step")) is not None


class FolderReader:
    """Reads files in `folder`; an unreadable or damaged file adds a sentence to `problems`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def read_bytes(self, name: str) -> bytes | None:
        """Return the content of a regular file; None if it is missing, unreadable or not regular.

        Raises:
            TransientError: the file system does not answer.
        """
        path = self.folder / name
        try:
            if not self.is_inside(name) and path.exists():
                self.problems.append(f"{text(name)} is a link out of the folder, and was left out.")
                return None
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return None
            if status.st_size > MAX_BYTES:
                self.problems.append(f"{text(name)} is too large and was left out.")
                return None
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self.add_unreadable(name, error)

    def read_json_lines(
        self, name: str, is_valid: Callable[[dict[str, Any]], bool] = is_record
    ) -> Iterator[dict[str, Any]]:
        """Yield each line of a JSON Lines file that is a valid dict; the rest is damaged."""
        num_damaged = 0
        for line in filter(None, (self.read_bytes(name) or b"").splitlines()):
            record = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
            if isinstance(record, dict) and is_valid(record):
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
        load = load_yaml if name.endswith(".yaml") else json.loads
        with suppress(yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
            value = load(data.decode(errors="replace"))
        if not isinstance(value, kind):
            self.problems.append(f"{name} is damaged.")
            return kind()
        return value

    def read_picture(self, name: str) -> str | None:
        """Return a PNG inside the folder as a data URI; None if it is missing or not a PNG."""
        data = self.read_bytes(name) if self.is_inside(name) else None
        if data is None:
            return None
        if not data.startswith(PNG_SIGNATURE):
            self.problems.append(f"{text(name)} is not a PNG and was left out.")
            return None
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"

    def is_inside(self, name: str) -> bool:
        """Return whether the path `name` is inside the folder after all links are resolved."""
        try:
            return (self.folder / name).resolve().is_relative_to(self.folder.resolve())
        except (OSError, RuntimeError, ValueError):  # a loop of links, or a NUL in the name
            return False

    def add_unreadable(self, name: str, error: OSError) -> None:
        """Add to `problems` that a file cannot be read.

        Raises:
            TransientError: a later attempt may succeed.
        """
        reason = f"cannot be read: {error.strerror}"
        if error.errno not in USER_ERRORS:
            raise TransientError(f"{self.folder / name} {reason}") from error
        self.problems.append(f"{text(name)} {reason}.")
