"""What the images are: digits from the package, Fashion-MNIST from anywhere, noise of any shape."""

import functools
import gc
import gzip
import hashlib
import http.server
import os
import shutil
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch
from conftest import compose, on_ranks
from test_idx import encode
from torchvision.datasets import FashionMNIST

from ddp_trainer.config.data import AugmentConfig, DataConfig, DigitsConfig, FashionMnistConfig, SyntheticConfig
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.data.dataset import ImageTensors, build_datasets
from ddp_trainer.data.datasets import fashion_mnist as module
from ddp_trainer.data.datasets.fashion_mnist import (
    DEBIAN_FOLDER,
    FILES,
    download,
    locate,
)

needs_debians_files = pytest.mark.skipif(not DEBIAN_FOLDER.is_dir(), reason="needs Debian's dataset-fashion-mnist")


class Resident(NamedTuple):
    """A data set whose splits are both kept in memory."""

    train: ImageTensors
    eval: ImageTensors
    class_names: Sequence[str]


def build_resident(config: DataConfig) -> Resident:
    datasets = build_datasets(config)
    assert isinstance(datasets.train, ImageTensors)
    assert isinstance(datasets.eval, ImageTensors)
    return Resident(datasets.train, datasets.eval, datasets.class_names)


def digits(**options: Any) -> DigitsConfig:
    values: dict[str, Any] = {"mean": [0.5], "std": [0.5]} | options
    return DigitsConfig(**values)


def fashion_mnist(root: Path | None = None) -> FashionMnistConfig:
    return FashionMnistConfig(mean=[0.5], std=[0.5], root=None if root is None else str(root))


# --- a validation split -------------------------------------------------------------------------


def rows(images: torch.Tensor) -> Counter[bytes]:
    return Counter(image.numpy().tobytes() for image in images)


def test_a_validation_split_is_held_out_of_the_training_split() -> None:
    whole, parts = build_resident(digits()), build_resident(digits(validation_fraction=0.1))
    assert (len(parts.train), len(parts.eval)) == (1298, 144)
    assert rows(parts.train.images) + rows(parts.eval.images) == rows(whole.train.images)


def test_a_validation_split_is_the_same_every_time() -> None:
    one, other = (build_resident(digits(validation_fraction=0.25)) for _ in range(2))
    assert torch.equal(one.eval.images, other.eval.images)
    assert torch.equal(one.train.labels, other.train.labels)


def test_a_validation_split_without_an_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.validation_fraction=0.0001 of 1442 training images"):
        build_resident(digits(validation_fraction=0.0001))


# --- digits -------------------------------------------------------------------------------------


def test_digits_are_split_four_to_one_in_every_class() -> None:
    splits = build_resident(digits())
    assert (len(splits.train), len(splits.eval), len(splits.class_names)) == (1442, 355, 10)
    assert splits.train.images.shape == (1442, 1, 8, 8)
    for label in range(10):
        train, held_out = (int((part.labels == label).sum()) for part in (splits.train, splits.eval))
        assert held_out == (train + held_out) // 5


def test_the_splits_of_digits_are_disjoint_and_fixed() -> None:
    one, other = build_resident(digits()), build_resident(digits())
    assert torch.equal(one.eval.images, other.eval.images)
    assert torch.equal(one.train.images, other.train.images)
    train, held_out = ({image.numpy().tobytes() for image in part.images} for part in (one.train, one.eval))
    assert not train & held_out
    assert len(train) + len(held_out) == 1797


def test_digits_use_the_range_of_a_byte() -> None:
    images = build_resident(digits()).train.images
    assert (images.dtype, int(images.min()), int(images.max())) == (torch.uint8, 0, 240)


@pytest.mark.parametrize("name", ["digits", "fashion_mnist"])
def test_the_configured_mean_and_deviation_are_those_of_the_training_images(name: str) -> None:
    if name == "fashion_mnist" and not DEBIAN_FOLDER.is_dir():
        pytest.skip("needs Debian's dataset-fashion-mnist")
    config = compose(f"data={name}").data
    pixels = build_resident(config).train.images.double() / 255
    assert config.mean == pytest.approx([pixels.mean().item()], abs=5e-5)
    assert config.std == pytest.approx([pixels.std().item()], abs=5e-5)


def test_images_that_the_config_does_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.mean=\[0, 0, 0\] must have one value per channel"):
        build_resident(digits(mean=[0, 0, 0], std=[1, 1, 1]))
    with pytest.raises(ConfigError, match=r"random_crop_padding=8 must be smaller than the images of 8×8 pixels"):
        build_resident(digits(augment=AugmentConfig(random_crop_padding=8)))


# --- Fashion-MNIST in a folder ------------------------------------------------------------------


def write_small_set(folder: Path, *, pack: Callable[[bytes], bytes] = bytes, suffix: str = "") -> Path:
    """Write 6 training and 4 test images of 5×5 pixels as Fashion-MNIST's four files."""
    folder.mkdir(exist_ok=True)
    for prefix, count in (("train", 6), ("t10k", 4)):
        images = torch.arange(count * 25, dtype=torch.uint8).view(count, 5, 5)
        labels = torch.arange(count, dtype=torch.uint8)
        (folder / f"{prefix}-images-idx3-ubyte{suffix}").write_bytes(pack(encode(images)))
        (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(encode(labels)))
    return folder


@pytest.mark.parametrize(("pack", "suffix"), [(bytes, ""), (gzip.compress, ".gz"), (bytes, ".gz")])
def test_a_folder_of_raw_or_compressed_files_is_read(
    pack: Callable[[bytes], bytes], suffix: str, tmp_path: Path
) -> None:
    splits = build_resident(fashion_mnist(write_small_set(tmp_path / "root", pack=pack, suffix=suffix)))
    assert splits.train.images.flatten().tolist() == list(range(150))
    assert splits.train.images.shape == (6, 1, 5, 5)
    assert splits.eval.labels.tolist() == [0, 1, 2, 3]


def test_a_tilde_in_the_root_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_set(tmp_path / "root")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/root") == tmp_path / "root"


@needs_debians_files
def test_debians_files_are_the_real_ones() -> None:
    splits = build_resident(fashion_mnist())
    assert splits.train.images.shape == (60_000, 1, 28, 28)
    assert splits.eval.images.shape == (10_000, 1, 28, 28)
    assert splits.train.labels.bincount().tolist() == [6000] * 10
    assert splits.eval.labels.bincount().tolist() == [1000] * 10


def swap(folder: Path, one: str, other: str) -> None:
    (folder / one).rename(folder / "aside")
    (folder / other).rename(folder / one)
    (folder / "aside").rename(folder / other)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def label(path: Path, *values: int) -> None:
    path.write_bytes(encode(torch.tensor(values, dtype=torch.uint8)))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "train-images-idx3-ubyte is truncated: it has 165 bytes and": lambda root: truncate(
        root / "train-images-idx3-ubyte"
    ),
    "t10k-labels-idx1-ubyte is truncated: it has 11 bytes and": lambda root: truncate(root / "t10k-labels-idx1-ubyte"),
    "train-images-idx3-ubyte has labels and must have images: are two files swapped": lambda root: swap(
        root, "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
    ),
    "train-images-idx3-ubyte has 6 images and train-labels-idx1-ubyte 4 labels": lambda root: swap(
        root, "train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"
    ),
    "t10k-labels-idx1-ubyte has the label 10: it must be less than 10": lambda root: label(
        root / "t10k-labels-idx1-ubyte", 0, 1, 2, 10
    ),
    "t10k-images-idx3-ubyte is empty: ": lambda root: (root / "t10k-images-idx3-ubyte").write_bytes(
        encode(torch.zeros(0, 5, 5))
    ),
    "train-labels-idx1-ubyte is not an IDX file": lambda root: (root / "train-labels-idx1-ubyte").write_text("<html>"),
    "training images have 5 × 5 pixels and test images 4 × 4": lambda root: (
        root / "t10k-images-idx3-ubyte"
    ).write_bytes(encode(torch.zeros(4, 4, 4, dtype=torch.uint8))),
}


@pytest.mark.parametrize("expected", DAMAGES)
def test_a_damaged_set_is_refused_by_naming_the_file(expected: str, tmp_path: Path) -> None:
    root = write_small_set(tmp_path / "root")
    DAMAGES[expected](root)
    with pytest.raises(ConfigError) as refused:
        build_resident(fashion_mnist(root))
    said = str(refused.value)
    assert said.startswith(f"data.root={root}: ")
    assert expected in said
    assert said.endswith("; put the right files there")


@pytest.mark.parametrize("name", FILES)
def test_a_root_that_lacks_a_file_is_refused_before_anything_is_read(name: str, tmp_path: Path) -> None:
    root = write_small_set(tmp_path / "root")
    (root / name).unlink()
    with pytest.raises(ConfigError, match=rf"^data\.root={root} must be a folder .*: it lacks {name}$"):
        build_resident(fashion_mnist(root))


def test_a_root_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.root=.*/nowhere must be a folder .*: it is not a folder$"):
        build_resident(fashion_mnist(tmp_path / "nowhere"))


# --- the download -------------------------------------------------------------------------------


class Mirror:
    """An HTTP server on this machine that serves a folder, and counts what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: Counter[str] = Counter()
        mirror = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_request(self, code: Any = "-", size: Any = "-") -> None:
                mirror.asked[self.path] += 1

            def log_message(self, format: str, *args: Any) -> None: ...

        handler = functools.partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.handle_error = lambda request, client_address: None  # torchvision hangs up on its first request
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    """Serve Debian's files."""
    with Mirror(DEBIAN_FOLDER) as server:
        yield server


def _download(url: str, folder: str) -> list[str]:
    os.environ["no_proxy"] = "127.0.0.1"
    FashionMNIST.mirrors = [url]
    FashionMNIST.resources = [  # Debian packed the same arrays anew, so that the archives have other checksums
        (name, hashlib.md5((DEBIAN_FOLDER / name).read_bytes()).hexdigest()) for name, _ in FashionMNIST.resources
    ]
    return sorted(path.name for path in download(Path(folder)).iterdir())


@needs_debians_files
def test_ranks_that_start_at_once_download_once(mirror: Mirror, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "fashion_mnist"
    assert on_ranks(3, _download, mirror.url, str(cache)) == [sorted(FILES)] * 3
    assert mirror.asked == {f"/{name}.gz": 2 for name in FILES}  # 1 more for torchvision's redirects
    assert sorted(path.name for path in cache.parent.iterdir()) == ["fashion_mnist", "fashion_mnist.lock"]
    downloaded, debians = (build_resident(fashion_mnist(folder)) for folder in (cache, DEBIAN_FOLDER))
    for one, other in ((downloaded.train, debians.train), (downloaded.eval, debians.eval)):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a machine without Debian's package and without a network; return where its cache would be."""
    monkeypatch.setattr(module, "DEBIAN_FOLDER", tmp_path / "usr")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache" / "torch"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(FashionMNIST, "mirrors", [])
    return tmp_path / "cache" / "torch"


def test_files_in_the_cache_are_found(bare_machine: Path) -> None:
    bare_machine.mkdir(parents=True)
    folder = write_small_set(bare_machine / "fashion_mnist")
    assert locate(None) == folder


def test_debians_files_are_found_before_those_in_the_cache(bare_machine: Path, tmp_path: Path) -> None:
    bare_machine.mkdir(parents=True)
    write_small_set(bare_machine / "fashion_mnist")
    debians = write_small_set(tmp_path / "usr")
    assert locate(None) == debians
    (debians / FILES[0]).unlink()
    assert locate(None) == bare_machine / "fashion_mnist"


def assert_download_fails(cache: Path, because: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_resident(fashion_mnist())
    said = str(refused.value)
    del refused
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # urllib leaves the connection of an HTTP error to the garbage collector
    assert said.startswith(
        "data=fashion_mnist is missing and the download failed. Three ways: set data.root to a folder"
    )
    assert "install Debian's dataset-fashion-mnist" in said
    assert f"the download into {cache / 'fashion_mnist'} failed: " in said
    assert because in said
    assert len(said.splitlines()) == 1
    assert [path.name for path in cache.iterdir()] == ["fashion_mnist.lock"], "half a download was left"
    assert socket.getdefaulttimeout() is None


def test_a_server_that_is_not_there_is_an_error_that_names_three_ways(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # bound, not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{taken.getsockname()[1]}/"])
        assert_download_fails(bare_machine, "Connection refused")


def test_a_server_that_never_answers_is_given_up(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NETWORK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        assert_download_fails(bare_machine, "timed out")


def test_a_server_without_the_files_is_an_error(
    bare_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "www").mkdir()
    with Mirror(tmp_path / "www") as empty:
        monkeypatch.setattr(FashionMNIST, "mirrors", [empty.url])
        assert_download_fails(bare_machine, "HTTP Error 404")


def test_a_download_that_is_not_the_real_file_is_an_error(
    bare_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_set(tmp_path / "www", pack=gzip.compress, suffix=".gz")
    with Mirror(tmp_path / "www") as wrong:
        monkeypatch.setattr(FashionMNIST, "mirrors", [wrong.url])
        assert_download_fails(bare_machine, "corrupted")


def test_a_cache_that_was_damaged_is_refused_with_the_way_out(bare_machine: Path) -> None:
    bare_machine.mkdir(parents=True)
    folder = write_small_set(bare_machine / "fashion_mnist")
    truncate(folder / "train-images-idx3-ubyte")
    with pytest.raises(ConfigError, match=r"^data\.root=null: .* is truncated: .*; remove the folder, or set data"):
        build_resident(fashion_mnist())
    shutil.rmtree(folder)


# --- synthetic ----------------------------------------------------------------------------------


def synthetic(**options: Any) -> SyntheticConfig:
    return SyntheticConfig(**{"mean": [0.5] * 2, "std": [0.5] * 2, "channels": 2, "height": 5, "width": 7} | options)


def test_synthetic_images_have_any_shape() -> None:
    splits = build_resident(synthetic(num_train=12, num_eval=3, num_classes=4))
    assert splits.train.images.shape == (12, 2, 5, 7)
    assert splits.eval.images.shape == (3, 2, 5, 7)
    assert splits.train.images.dtype == torch.uint8
    assert int(splits.train.labels.max()) < 4


def test_synthetic_images_are_a_function_of_the_seed() -> None:
    one, again, other = (build_resident(synthetic(seed=seed)).train for seed in (1, 1, 2))
    assert torch.equal(one.images, again.images)
    assert torch.equal(one.labels, again.labels)
    assert not torch.equal(one.images, other.images)


def test_synthetic_images_of_a_class_are_alike() -> None:
    splits = build_resident(synthetic(num_train=200, num_eval=100, num_classes=3))
    centres = torch.stack([splits.train.images[splits.train.labels == c].float().mean(0) for c in range(3)])
    distances = torch.cdist(splits.eval.images.float().flatten(1), centres.flatten(1))
    assert torch.equal(distances.argmin(1), splits.eval.labels)
