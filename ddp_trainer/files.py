"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` by way of a temporary name, so that no reader and no crash sees half of it.

    Raises:
        OSError: it cannot be written; `path` is as it was.
    """
    aside = path.with_name(f".{path.name}.writing")
    try:
        with open(aside, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def fsync_directory(folder: Path) -> None:
    """Return once the names in `folder` are on disk: a rename is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
