"""Data sets of torchvision, from small files in their real formats: as torchvision itself reads
them.
"""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_sets import write_fashion_mnist
from PIL import Image
from processes import launch, on_ranks
from runs import compose, read_summary
from torch.utils.data import Subset
from torchvision import datasets

from ddp_trainer import run
from ddp_trainer.config.data import Cifar10Config, TorchvisionDataConfig
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.data.build import build_datasets
from ddp_trainer.data.dataset import Datasets, ImageTensors, num_samples, read_sample
from ddp_trainer.data.datasets.torchvision_sets import names_of_classes
from ddp_trainer.data.images.image_files import ImageFiles

NOISE = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return NOISE.integers(0, 256, shape, dtype=np.uint8)


def photo(path: Path, *, height: int = 20, width: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(height, width, 3)).save(path)


def write_cifar(root: Path, *, fine: bool = False) -> None:
    """Write the pickles of CIFAR-10 or CIFAR-100: 20 training images and 10 for evaluation."""
    folder = root / ("cifar-100-python" if fine else "cifar-10-batches-py")
    key = "fine_labels" if fine else "labels"
    folder.mkdir(parents=True)
    names = (
        {"train": 20, "test": 10}
        if fine
        else {f"data_batch_{n}": 4 for n in range(1, 6)} | {"test_batch": 10}
    )
    for name, count in names.items():
        (folder / name).write_bytes(
            pickle.dumps({"data": pixels(count, 3072), key: [n % 4 for n in range(count)]})
        )
    meta, label_key = ("meta", "fine_label_names") if fine else ("batches.meta", "label_names")
    (folder / meta).write_bytes(pickle.dumps({label_key: ["cat", "dog", "fox", "owl"]}))


def write_idx(root: Path, folder: str, prefixes: dict[str, str], *, count: int = 12) -> None:
    """Write the IDX files of MNIST and of the data sets that are like it."""
    (root / folder / "raw").mkdir(parents=True)
    for prefix, labels in prefixes.items():
        images = struct.pack(">IIII", 0x803, count, 28, 28) + pixels(count, 28, 28).tobytes()
        (root / folder / "raw" / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        data = struct.pack(">II", 0x801, count) + bytes(n % 10 for n in range(count))
        (root / folder / "raw" / labels).write_bytes(data)


def write_kmnist(root: Path) -> None:
    write_idx(root, "KMNIST", {split: f"{split}-labels-idx1-ubyte" for split in ("train", "t10k")})


def write_emnist(root: Path) -> None:
    prefixes = [f"emnist-letters-{split}" for split in ("train", "test")]
    write_idx(root, "EMNIST", {prefix: f"{prefix}-labels-idx1-ubyte" for prefix in prefixes})


def write_stl10(root: Path) -> None:
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    for split, count in (("train", 12), ("test", 6)):
        (folder / f"{split}_X.bin").write_bytes(pixels(count, 3, 96, 96).tobytes())
        (folder / f"{split}_y.bin").write_bytes(bytes(1 + n % 10 for n in range(count)))
    (folder / "class_names.txt").write_text("\n".join(f"class {n}" for n in range(10)))
    (folder / "fold_indices.txt").write_text("0")
    (folder / "unlabeled_X.bin").write_bytes(b"")


def write_food101(root: Path) -> None:
    meta = root / "food-101/meta"
    meta.mkdir(parents=True)
    for split in ("train", "test"):
        names = {name: [f"{name}/{split}{n}" for n in range(3)] for name in ("pizza", "soup")}
        (meta / f"{split}.json").write_text(json.dumps(names))
        for name in [name for part in names.values() for name in part]:
            photo(root / f"food-101/images/{name}.jpg")


def write_pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    (base / "annotations").mkdir(parents=True)
    (base / "images").mkdir()
    for split in ("trainval", "test"):
        names = [
            (f"{pet}_{split}_{n}", 1 + label)
            for label, pet in enumerate(("Abyssinian", "beagle"))
            for n in range(3)
        ]
        lines = [f"{name} {label} {1 + label % 2} 1" for name, label in names]
        (base / f"annotations/{split}.txt").write_text("\n".join(lines) + "\n")
        for name, _ in names:
            photo(base / f"images/{name}.jpg")


def write_eurosat(root: Path) -> None:
    for name in ("Forest", "River"):
        for number in range(10):
            photo(root / f"eurosat/2750/{name}/{name}_{number}.jpg", height=64, width=64)


def write_dtd(root: Path) -> None:
    base = root / "dtd/dtd"
    (base / "labels").mkdir(parents=True)
    for split in ("train", "test", "val"):
        names = [
            f"{texture}/{texture}_{split}_{n}.jpg"
            for texture in ("banded", "dotted")
            for n in range(3)
        ]
        (base / f"labels/{split}1.txt").write_text("\n".join(names) + "\n")
        for name in names:
            photo(base / "images" / name)


SETS: dict[str, tuple[Callable[[Path], None], dict[str, Any], bool]] = {
    "CIFAR10": (write_cifar, {}, True),
    "CIFAR100": (lambda root: write_cifar(root, fine=True), {}, True),
    "KMNIST": (write_kmnist, {}, True),
    "EMNIST": (write_emnist, {"arguments": {"split": "letters"}}, True),
    "STL10": (write_stl10, {}, True),
    "Food101": (write_food101, {}, False),
    "OxfordIIITPet": (write_pets, {}, False),
    "DTD": (write_dtd, {"test_split": "val"}, False),
    "EuroSAT": (write_eurosat, {"validation_fraction": 0.2}, False),
}
"""How the files are written, keys of the config, and whether the images are kept in memory."""


@pytest.fixture(autouse=True)
def without_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchvision take files whose MD5 is not that of the real ones."""
    skip_checksums(monkeypatch.setattr)


def skip_checksums(setattr: Callable[[str, Any], None]) -> None:
    for module in ("cifar", "stl10", "fer2013"):
        setattr(
            f"torchvision.datasets.{module}.check_integrity",
            lambda path, md5=None: Path(path).is_file(),
        )


def config(name: str, root: Path, **more: Any) -> TorchvisionDataConfig:
    return TorchvisionDataConfig(
        dataset=name,
        root=str(root),
        image_size=16,
        cache_dir=str(root / "cache"),
        **SETS[name][1],
        **more,
    )


def build(name: str, root: Path) -> Datasets:
    SETS[name][0](root)
    return build_datasets(config(name, root))


@pytest.mark.parametrize("name", SETS)
def test_images_and_labels_are_those_of_torchvision(name: str, tmp_path: Path) -> None:
    ours = build(name, tmp_path)
    kind = getattr(datasets, name)
    options = dict(SETS[name][1].get("arguments", {}))
    splits: list[Any] = []
    if name == "EuroSAT":
        splits = [kind(str(tmp_path))]
    elif (hasattr(kind, "train_list") and name.startswith("CIFAR")) or name.endswith("MNIST"):
        splits = [kind(str(tmp_path), train=train, **options) for train in (True, False)]
    else:
        first, second = {"OxfordIIITPet": ("trainval", "test"), "DTD": ("train", "val")}.get(
            name, ("train", "test")
        )
        splits = [kind(str(tmp_path), split=split) for split in (first, second)]
    is_resident = SETS[name][2]
    for split, theirs in zip((ours.train, ours.eval), splits, strict=False):
        assert isinstance(split, ImageTensors) == is_resident
        if isinstance(split, ImageTensors):
            assert len(split) == len(theirs)
            for index in range(len(split)):
                image, label = read_sample(theirs, index)
                assert torch.equal(split.images[index], image)
                assert split.labels[index] == label
    if not is_resident:
        files = [
            split.dataset if isinstance(split, Subset) else split
            for split in (ours.train, ours.eval)
        ]
        for split, theirs in zip(files, splits, strict=False):
            assert isinstance(split, ImageFiles)
            assert len(split) == len(theirs)
            seen = sorted(
                (split.decode(n).sum().item(), int(split.labels[n])) for n in range(len(split))
            )
            expected = sorted(
                (int(np.asarray(image, dtype=np.int64).sum()), label) for image, label in theirs
            )
            assert [label for _, label in seen] == [label for _, label in expected]
            # other decoders
            assert all(abs(a - b) < 0.02 * b for (a, _), (b, _) in zip(seen, expected, strict=True))
    if name == "EuroSAT":
        assert (num_samples(ours.train), num_samples(ours.eval)) == (16, 4)
    names = getattr(splits[0], "classes", None)
    assert names is None or list(ours.class_names) == list(names)


def test_classes_of_the_same_name_stay_apart() -> None:
    """ImageNet has two classes named crane, a bird and a machine."""
    names = names_of_classes(SimpleNamespace(classes=[("crane",), ("dog", "hound"), ("crane",)]))
    assert names == ["crane (0)", "dog", "crane (2)"]


def test_cifar10_is_a_shorthand(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    ours = build_datasets(Cifar10Config(root=str(tmp_path)))
    assert ours.image_shape == (3, 32, 32)
    assert list(ours.class_names) == ["cat", "dog", "fox", "owl"]


WRONG: dict[str, dict[str, Any]] = {
    "data.dataset=CIFAR11 is not a data set of torchvision: did you mean CIFAR": {
        "dataset": "CIFAR11"
    },
    "data.dataset=os is not a data set of torchvision": {"dataset": "os"},
    "data.dataset=CIFAR10 cannot be read from data.root={root} (Dataset not found": {},
    "data.dataset=KMNIST cannot be read from data.root={root} (": {"dataset": "KMNIST"},
    "data.arguments={{}} does not fit EMNIST: ": {"dataset": "EMNIST"},
    "data.dataset=Food101: Unknown value": {"dataset": "Food101", "train_split": "training"},
    "data.dataset=FakeData is not a data set of torchvision": {"dataset": "FakeData"},
}


@pytest.mark.parametrize("expected", WRONG)
def test_what_cannot_be_read_is_one_error(expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build_datasets(TorchvisionDataConfig(root=str(tmp_path), **WRONG[expected]))
    assert str(error.value).startswith(expected.format(root=tmp_path)), error.value
    assert "\n" not in str(error.value)


def test_a_set_without_a_split_for_evaluation_needs_a_fraction(tmp_path: Path) -> None:
    write_eurosat(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"^data\.dataset=EuroSAT has no split for evaluation: set data\.validation_f",
    ):
        build_datasets(TorchvisionDataConfig(dataset="EuroSAT", root=str(tmp_path)))


def test_a_set_whose_images_are_neither_in_memory_nor_in_files_is_one_error(tmp_path: Path) -> None:
    rows = [f"{n},{'7 ' * 48 * 48},{usage}" for n, usage in enumerate(("Training", "PublicTest"))]
    (tmp_path / "fer2013").mkdir()
    (tmp_path / "fer2013/fer2013.csv").write_text("\n".join(("emotion,pixels,Usage", *rows)))
    with pytest.raises(
        ConfigError, match=r"^data\.dataset=FER2013 has its images neither in memory nor in files: "
    ):
        build_datasets(TorchvisionDataConfig(dataset="FER2013", root=str(tmp_path)))


def test_an_unknown_test_split_is_one_error(tmp_path: Path) -> None:
    write_food101(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^data\.dataset=Food101: Unknown value 'tset' for argument split\."
    ):
        build_datasets(config("Food101", tmp_path, test_split="tset"))


# with train, train and split, neither
@pytest.mark.parametrize("dataset", ["CIFAR10", "EMNIST", "Caltech101"])
def test_names_of_splits_for_a_set_without_them_are_one_error(dataset: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"data\.test_split=val must be null: the splits of data\.dataset={dataset} are",
    ):
        build_datasets(TorchvisionDataConfig(dataset=dataset, root=str(tmp_path), test_split="val"))


def test_a_held_out_part_needs_no_split_for_evaluation(tmp_path: Path) -> None:
    write_food101(tmp_path)
    (tmp_path / "food-101/meta/test.json").unlink()
    ours = build_datasets(config("Food101", tmp_path, validation_fraction=0.5))
    assert (num_samples(ours.train), num_samples(ours.eval)) == (3, 3)


def train_cifar(root: Path) -> None:
    skip_checksums(lambda name, value: pytest.MonkeyPatch().setattr(name, value))
    run(
        compose(
            "data=cifar10",
            f"data.root={root}",
            "model=lenet",
            "global_batch_size=4",
            "epochs=1",
            "name=run",
            f"output_dir={root}",
        )
    )


def test_two_ranks_train_on_cifar10(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    on_ranks(2, train_cifar, tmp_path)
    assert read_summary(tmp_path / "run")["eval/count"] == 10


def test_fashion_mnist_is_that_of_its_own_choice(tmp_path: Path) -> None:
    """Read the files through torchvision, too."""
    write_fashion_mnist(tmp_path / "FashionMNIST/raw")
    done = launch(
        "data=torchvision",
        "data.dataset=FashionMNIST",
        f"data.root={tmp_path}",
        "model=lenet",
        "max_steps=2",
        f"output_dir={tmp_path}",
        "name=run",
    )
    assert done.code == 0, done.output
    assert "600 training, 200 test images" in done.output
