"""Files that are written completely or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[BufferedRandom]:
    """Yield a temporary file, which is synced to disk and renamed to `path` in the end; OSError leaves `path` as is."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` by `replace_file`."""
    with replace_file(path) as file:
        file.write(text.encode())
