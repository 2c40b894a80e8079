"""Files that are written completely or not at all."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to a temporary file, sync it to disk and rename it to `path`.

    Raises:
        OSError: it cannot be written; `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def fsync_directory(folder: Path) -> None:
    """Sync the names in `folder` to disk, because a rename is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
