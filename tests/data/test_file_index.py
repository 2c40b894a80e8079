"""The index of a folder's files: what a saved one notices, and what happens to one that is
damaged.
"""

import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.data.images import file_index
from ddp_trainer.data.images.file_index import FileIndex, load_index

NAMES = ("cat/1.png", "cat/deep/2.JPG", "cat/ü\n3.webp", "dog/4.png", "dog/5.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder of files that were written an hour ago."""
    root = tmp_path / "pictures"
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for path in [root, *root.rglob("*")]:
        age(path)
    return root


def age(path: Path, *, seconds: float = 3600) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of folders that were scanned."""
    scanned = []
    scan = file_index.scan

    def counted(root: Path, path: Path) -> FileIndex:
        scanned.append(root)
        return scan(root, path)

    monkeypatch.setattr(file_index, "scan", counted)
    return scanned


def names(index: FileIndex) -> list[str]:
    return [os.path.relpath(index.path(number), index.root) for number in range(len(index))]


def test_a_saved_index_is_that_of_the_scan(root: Path, scans: list[Path], tmp_path: Path) -> None:
    first, second = (load_index(root, tmp_path / "cache") for _ in range(2))
    assert scans == [root]
    assert names(first) == names(second) == sorted(NAMES)
    assert first.class_names == second.class_names == ["cat", "dog"]
    assert first.counts.tolist() == second.counts.tolist() == [3, 2]
    assert second.files["size"].tolist() == [
        os.path.getsize(second.path(number)) for number in range(5)
    ]
    assert (first.digest(), first.digest(with_times=True)) == (
        second.digest(),
        second.digest(with_times=True),
    )


def overwrite(path: Path) -> None:
    """Write other bytes into the same file, which leaves its folder's time."""
    with open(path, "r+") as file:
        file.write("other")


CHANGES: dict[str, Callable[[Path], Any]] = {
    "a file was added": lambda root: (root / "cat/deep/6.png").write_text("6"),
    "a file was removed": lambda root: (root / "dog/4.png").unlink(),
    "a file was renamed": lambda root: (root / "dog/4.png").rename(root / "dog/7.png"),
    "a file was overwritten": lambda root: overwrite(root / "dog/4.png"),
    "a class was added": lambda root: (root / "fox").mkdir(),
    "a class was removed": lambda root: (root / "cat/deep").rename(root / "../deep"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str, root: Path, scans: list[Path], tmp_path: Path) -> None:
    before = load_index(root, tmp_path / "cache")
    CHANGES[change](root)
    after = load_index(root, tmp_path / "cache")
    assert scans == [root, root]
    assert before.digest(with_times=True) != after.digest(with_times=True)


def test_a_folder_that_changed_just_now_is_scanned_again(
    root: Path, scans: list[Path], tmp_path: Path
) -> None:
    (root / "cat/8.png").write_text("8")
    for _ in range(2):
        load_index(root, tmp_path / "cache")
    assert len(scans) == 2
    age(root / "cat", seconds=60)
    for _ in range(2):
        load_index(root, tmp_path / "cache")
    assert len(scans) == 3


class Executed:
    """An object whose pickle writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "executed"))


def save(path: Path, names: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.savez(file, names=names)


def content_of(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as saved:
        return dict(saved)


def save_version_2(path: Path) -> None:
    """Change the texts of the index to arrays of bytes."""
    content = content_of(path)
    texts = {"names": "".join(sorted(NAMES)), "folders": "\0cat\0cat/deep\0dog"}
    texts["class_names"] = "cat\0dog"
    content |= {key: np.frombuffer(text.encode(), np.uint8) for key, text in texts.items()}
    with open(path, "wb") as file:
        np.savez(file, **content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "a byte flipped": lambda path: path.write_bytes(path.read_bytes().replace(b"cat/1", b"cat/9")),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Executed(path.with_name("executed")))),
    "an array of objects": lambda path: save(
        path, np.array([Executed(path.with_name("executed"))])
    ),
    "another archive": lambda path: save(path, np.zeros(3)),
    "an index of version 2": lambda path: save_version_2(path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_made_again(
    damage: str, root: Path, scans: list[Path], tmp_path: Path
) -> None:
    cache_dir = tmp_path / "cache"
    load_index(root, cache_dir)
    [path] = cache_dir.glob("*.index")
    DAMAGE[damage](path)
    assert names(load_index(root, cache_dir)) == sorted(NAMES)
    assert len(scans) == 2
    assert not (cache_dir / "executed").exists()


WRONG = (
    np.zeros(0),
    np.zeros(2, np.int64),
    np.zeros((2, 2), np.int64),
    np.int64(2**62),
    np.array([-(2**63), 2**63 - 1]),
    np.array(["cat", "dog"]),
    np.array("cat"),
    np.array([b"cat/1.png"]),
    np.array([(b"cat/1.png", 9.0, 0.0)], [("name", "S9"), ("size", "f8"), ("time", "f8")]),
    np.array([(b"/etc/passwd", 1)], [("name", "S11"), ("size", "i8")]),
)


@pytest.mark.parametrize("key", ["class_names", "counts", "files", "folders"])
@pytest.mark.parametrize("wrong", [*range(len(WRONG)), None])
def test_an_index_with_other_content_is_made_again(
    key: str, wrong: int | None, root: Path, scans: list[Path], tmp_path: Path
) -> None:
    cache_dir = tmp_path / "cache"
    load_index(root, cache_dir)
    [path] = cache_dir.glob("*.index")
    content = content_of(path)
    if wrong is None:
        del content[key]
    else:
        content[key] = WRONG[wrong]
    with open(path, "wb") as file:
        np.savez(file, **content)
    index = load_index(root, cache_dir)
    assert names(index) == sorted(NAMES)
    assert index.class_names == ["cat", "dog"]
    assert len(scans) == 2 or (key, index.class_names) == ("class_names", WRONG[5].tolist())


def test_without_a_folder_for_it_an_index_is_not_saved(
    root: Path, scans: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        assert names(load_index(root, tmp_path / "cache")) == sorted(NAMES)
    assert len(scans) == 2


def test_processes_of_a_node_scan_once(
    root: Path, scans: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = file_index.walk

    def slow(*args: Any) -> Any:
        time.sleep(0.2)
        return walk(*args)

    monkeypatch.setattr(file_index, "walk", slow)
    threads = [
        threading.Thread(target=load_index, args=(root, tmp_path / "cache")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # the locks of a process's open files exclude each other like those of processes
    assert len(scans) == 1


def test_hidden_files_and_links_in_a_circle_are_left_out(root: Path, tmp_path: Path) -> None:
    (root / "cat/._1.png").write_text("of macOS")
    (root / "cat/.thumbnails").mkdir()
    (root / "cat/.thumbnails/1.png").write_text("small")
    (root / "cat/deep/loop").symlink_to(root / "cat")
    assert names(load_index(root, tmp_path / "cache")) == sorted(NAMES)


def test_a_folder_that_cannot_be_read_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refused(path: Any) -> Any:  # root may read everything
        if os.fsencode(path).endswith(b"/deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(
        ConfigError, match=r"^/.*/pictures/cat/deep cannot be read \(Permission denied\): make it"
    ):
        load_index(root, tmp_path / "cache")


def test_broken_links_are_counted_until_their_files_come(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):  # as git-annex without contents
        (root / f"dog/{number}\x1b.png").symlink_to(f"../annex/{number}")
    (root / "dog/circle.jpg").symlink_to("circle.jpg")
    (root / "dog/notes").symlink_to("missing")
    age(root / "dog")
    for _ in range(2):  # from the scan, and from the saved index
        caplog.clear()
        assert names(load_index(root, tmp_path / "cache")) == sorted(NAMES)
        [record] = caplog.records
        message = f"{root} has 4 symbolic links that lead to no file, for example dog/0\\x1b.png: "
        assert record.getMessage().startswith(message)
    assert list((tmp_path / "cache").glob("*.index"))
    (root / "annex").mkdir()
    (root / "annex").rename(tmp_path / "annex")
    age(root)
    load_index(root, tmp_path / "cache")
    for number in range(3):
        (root / f"dog/{number}\x1b.png").unlink()
        (root / f"dog/{number}\x1b.png").symlink_to(tmp_path / f"annex/{number}")
    age(root / "dog")
    load_index(root, tmp_path / "cache")
    for number in range(3):  # changes no folder of the data set
        (tmp_path / f"annex/{number}").write_text("image")
    assert len(load_index(root, tmp_path / "cache")) == len(NAMES) + 3
