"""The image files of a folder: scanned by threads once per node, and saved in a file."""

import hashlib
import os
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddp_trainer.config.errors import path_error
from ddp_trainer.files import lock_file, replace_file
from ddp_trainer.progress import show_progress

EXTENSIONS = tuple(b".avif .bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp".split())
IMAGE_FILES = f"files that end in {b', '.join(EXTENSIONS).decode()}"
SCAN_THREADS = 8
"""Threads that scan folders: more than cores, because they wait for the file system."""
LOCK_SECONDS = 3600.0
"""How long a rank waits for another rank that scans."""
MIN_AGE_SECONDS = 3.0
"""Time without a change of a folder before it is saved: file systems round such times."""
NUM_CHECKED_FILES = 1000
"""Number of files to compare: overwriting a file does not change its folder's time."""

SAVED = (
    "class_names",
    "counts",
    "names",
    "ends",
    "sizes",
    "times",
    "folders",
    "folder_times",
)
"""The fields of an index that its file has."""

Array = np.ndarray[Any, np.dtype[Any]]
File = tuple[bytes, int, int]
"""Name relative to the root folder, size in bytes, and modification time in ns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIndex:
    """The images below the class folders of `root`, sorted by class and name."""

    root: Path
    saved_in: Path
    """The file for this index, even if it could not be saved."""
    class_names: list[str]
    """The name of each class; in `scan`, the sorted class folders. A class may have no image."""
    counts: Array
    """int64 [classes]: number of images of each class."""
    names: bytes
    """The names of all files, relative to `root`, one after another."""
    ends: Array
    """int64 [N]: where each name ends in `names`."""
    sizes: Array
    """int64 [N]: size of each file in bytes."""
    times: Array
    """int64 [N]: when each file was changed, in ns."""
    folders: list[bytes]
    """All folders that were read, relative to `root`."""
    folder_times: Array
    """int64 [folders]: when each folder was changed, in ns."""

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> bytes:
        """Return the path of the file `index`."""
        start = self.ends[index - 1] if index else 0
        return os.path.join(os.fsencode(self.root), self.names[start : self.ends[index]])

    def digest(self, *, with_times: bool = False) -> str:
        """Return a digest of names and sizes, and of times if `with_times`.

        Without times, it is equal for copies of the files on other nodes.
        """
        digest = hashlib.sha256("\0".join(self.class_names).encode(errors="surrogateescape"))
        digest.update(self.counts.data)
        digest.update(self.names)
        digest.update(self.ends.data)
        digest.update(self.sizes.data)
        if with_times:
            digest.update(self.times.data)
        return digest.hexdigest()

    def is_current(self) -> bool:
        """Return whether all folders and `NUM_CHECKED_FILES` files are as in the scan.

        Raises OSError if one of them does not exist any more.
        """
        count = min(NUM_CHECKED_FILES, len(self))
        chosen = np.unique(np.linspace(0, len(self) - 1, count).astype(np.int64)).tolist()
        folders = [os.path.join(os.fsencode(self.root), name) for name in self.folders]
        with ThreadPoolExecutor(SCAN_THREADS) as pool:
            folder_stats = list(pool.map(os.stat, folders))
            file_stats = list(pool.map(os.stat, map(self.path, chosen)))
        return (
            [stat.st_mtime_ns for stat in folder_stats] == self.folder_times.tolist()
            and [stat.st_mtime_ns for stat in file_stats] == self.times[chosen].tolist()
            and [stat.st_size for stat in file_stats] == self.sizes[chosen].tolist()
        )


@contextmanager
def path_errors() -> Iterator[None]:
    """Name the path of an OSError inside the context in a ConfigError or TransientError."""
    try:
        yield
    except OSError as error:
        message = f"{os.fsdecode(error.filename)} cannot be read: {error.strerror}"
        raise path_error(error, message) from error


def load_index(root: Path, cache_dir: Path) -> FileIndex:
    """Return the index of `root` that is saved in `cache_dir`; if it is not current, scan and save.

    The processes of a node scan one at a time. If `cache_dir` cannot be written, each process
    scans. If a folder cannot be read, raises ConfigError, or TransientError where the user cannot
    change the cause.
    """
    path = cache_dir / f"{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.index"
    if (saved := read_index(path, root)) is not None:
        return saved
    holder = (
        f"another process has been scanning {root} for {LOCK_SECONDS:.0f} s: is it still running?"
    )
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with lock_file(path.with_suffix(".lock"), seconds=LOCK_SECONDS, holder=holder):
            return read_index(path, root) or save_index(scan(root, path))
    except OSError:
        return scan(root, path)


def scan(root: Path, path: Path) -> FileIndex:
    """Scan `root` and return its index. path: the file in which it can be saved.

    If a folder cannot be read, raises ConfigError, or TransientError where the user cannot change
    the cause.
    """
    with (
        path_errors(),
        show_progress(f"scanning {root}") as advance,
        ThreadPoolExecutor(SCAN_THREADS) as pool,
    ):
        folders = {b"": os.stat(root).st_mtime_ns}
        entries = [entry for entry in os.scandir(root) if not entry.name.startswith(".")]
        classes = sorted(entry.name for entry in entries if entry.is_dir())

        def scan_class(name: str) -> list[File]:
            files = sorted(walk(os.fsencode(root), os.fsencode(name), folders, set()))
            advance(len(files))
            return files

        parts = list(pool.map(scan_class, classes))
    return build_index(root, path, classes, parts, folders)


def index_files(
    paths: Sequence[Path], labels: Sequence[int], class_names: list[str], cache_dir: Path
) -> FileIndex:
    """Return the index of `paths`, whose class numbers are `labels`, sorted by class and name.

    If a file cannot be read, raises ConfigError, or TransientError where the user cannot change the
    cause.
    """
    names = list(map(os.fsencode, paths))
    root = os.path.commonpath(map(os.path.dirname, names))
    parts: list[list[File]] = [[] for _ in class_names]
    with path_errors():
        for label, name in sorted(zip(labels, names, strict=True)):
            status = os.stat(name)
            parts[label].append((os.path.relpath(name, root), status.st_size, status.st_mtime_ns))
    folder = Path(os.fsdecode(root))
    return build_index(folder, cache_dir / "none.index", class_names, parts, folders={})


def build_index(
    root: Path,
    saved_in: Path,
    class_names: list[str],
    parts: Sequence[list[File]],
    folders: dict[bytes, int],
) -> FileIndex:
    """Return the index of the files below `root`.

    parts: the files of each class; folders: modification time of each folder in ns; saved_in: the
    file for the index.
    """
    files = [file for part in parts for file in part]
    numbers = np.array([(len(file[0]), *file[1:]) for file in files], np.int64).reshape(-1, 3)
    return FileIndex(
        root=root,
        saved_in=saved_in,
        class_names=class_names,
        counts=np.array(list(map(len, parts)), np.int64),
        names=b"".join(name for name, _, _ in files),
        ends=numbers[:, 0].cumsum(),
        sizes=numbers[:, 1].copy(),
        times=numbers[:, 2].copy(),
        folders=list(folders),
        folder_times=np.array(list(folders.values()), np.int64),
    )


def walk(
    root: bytes, folder: bytes, folders: dict[bytes, int], visited: set[tuple[int, int]]
) -> Iterator[File]:
    """Yield each image in `folder` and below it as a `File` relative to `root`.

    Each folder is read once: its device and inode are added to `visited`, its modification time in
    ns to `folders`.
    """
    path = os.path.join(root, folder)
    status = os.stat(path)
    if (status.st_dev, status.st_ino) in visited:  # a link to a folder that was visited
        return
    visited.add((status.st_dev, status.st_ino))
    folders[folder] = status.st_mtime_ns
    with os.scandir(path) as entries:
        for entry in entries:
            name = os.path.join(folder, entry.name)
            # for example the ._x.jpg of macOS, which are not images
            if entry.name.startswith(b"."):
                continue
            if entry.name.lower().endswith(EXTENSIONS) and entry.is_file():
                found = entry.stat()
                yield name, found.st_size, found.st_mtime_ns
            elif entry.is_dir():
                yield from walk(root, name, folders, visited)


def save_index(index: FileIndex) -> FileIndex:
    """Return `index`, after trying to save it unless a folder changed just now."""
    if len(index) and time.time_ns() - int(index.folder_times.max()) > MIN_AGE_SECONDS * 1e9:
        content: dict[str, Any] = {name: getattr(index, name) for name in SAVED}
        with suppress(OSError), replace_file(index.saved_in) as file:
            np.savez(file, allow_pickle=False, **content)
    return index


def read_index(path: Path, root: Path) -> FileIndex | None:
    """Return the index in `path`; None if it is missing, damaged or not current."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            content: dict[str, Any] = dict(saved)
        for name in ("class_names", "names", "folders"):
            content[name] = content[name].tolist()
        index = FileIndex(root=root, saved_in=path, **content)
        return index if index.is_current() else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
