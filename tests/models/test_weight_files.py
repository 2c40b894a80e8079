"""``model.weights``: the files that training scripts write, and files that are refused."""

import argparse
import enum
import importlib
import io
import logging
import math
import pickle
import struct
import tarfile
import time
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.models import LeNetConfig
from ddp_trainer.models import build_model
from ddp_trainer.models.fine_tuning import load_weights
from ddp_trainer.models.weight_files import find_weights

NUM_CLASSES = 4
State = dict[str, Tensor]


class Color(enum.Enum):
    red = 1


class Settings:
    """Any object of a script."""

    def __init__(self) -> None:
        self.lr = 0.1


class Bag(dict):  # type: ignore[type-arg]
    """A mapping of a script, as Lightning's AttributeDict."""


def lenet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(LeNetConfig(), image_shape=(1, 28, 28), num_classes=NUM_CLASSES)


def arrays(state: State) -> dict[str, Any]:
    return {name: value.numpy() for name, value in state.items()}


def prefixed(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": value for name, value in state.items()}


OTHER = prefixed("", {name: value + 1 for name, value in lenet(1).state_dict().items()})
"""Weights that must not be taken."""
FILES: dict[str, Callable[[State], Any]] = {
    "a state dict": lambda state: state,
    "an OrderedDict": lambda state: OrderedDict(state),
    "a defaultdict": lambda state: defaultdict(list, state),
    "parameters": lambda state: {name: nn.Parameter(value) for name, value in state.items()},
    "half precision": lambda state: {name: value.half() for name, value in state.items()},
    "of DDP": lambda state: prefixed("module.", state),
    "of torch.compile": lambda state: prefixed("_orig_mod.", state),
    "of DDP and torch.compile": lambda state: prefixed("module._orig_mod.", state),
    "averaged by torch": lambda state: {
        "n_averaged": torch.tensor(7),
        **prefixed("module.", state),
    },
    "of torchvision's references": lambda state: {
        "model": state,
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{}]},
        "lr_scheduler": {"last_epoch": 3},
        "epoch": 3,
        "args": argparse.Namespace(data_path=Path("/data"), lr=0.1),
    },
    "of torchvision's references with averages": lambda state: {
        "model": OTHER,
        "args": argparse.Namespace(model="resnet50"),
        "model_ema": {"n_averaged": torch.tensor(7), **prefixed("module.", state)},
    },
    "of Lightning": lambda state: {
        "epoch": 3,
        "pytorch-lightning_version": "2.5",
        "state_dict": {
            **prefixed("model.", state),
            "loss.weight": torch.ones(4),
            "metric.total": torch.tensor(3),
        },
        "hyper_parameters": Bag(root=Path("/data"), color=Color.red),
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_path": Path("/x")}},
    },
    "of timm": lambda state: {
        "arch": "lenet",
        "state_dict": OTHER,
        "state_dict_ema": state,
        "args": argparse.Namespace(lr=np.float64(0.1)),
        "metric": np.float64(81.5),
    },
    "of detectron": lambda state: {"model": arrays(state), "__author__": "somebody"},
    "of a script": lambda state: {
        "net": state,
        "best_acc": np.float32(0.9),
        "history": np.arange(3),
        "names": np.array(["a", "b"]),
        "settings": Settings(),
        "random": np.random.RandomState(0),
    },
    "long tuples": lambda state: {
        "model": state,
        "classes": {split: tuple(map(str, range(20_000))) for split in ("train", "val")},
        (0, ("a", frozenset({(1, 2)}))): ((3, 3), (3, 3)),
    },
    "nested": lambda state: {"checkpoint": {"weights": {"backbone": prefixed("net.", state)}}},
    "in a mapping of a script": lambda state: {"model": Bag(state), "other": Bag(lr=0.1)},
    "arrays": arrays,
    "with a number beside the weights": lambda state: {**state, "step": np.int64(3)},
    "with the momentum first": lambda state: {
        "momentum": {name: torch.zeros(2) for name in state},
        "params": state,
    },
}


def write_torch(content: Any, path: Path) -> None:
    torch.save(content, path)


def write_old_torch(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def write_pickle(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def check(path: Path, expected: State) -> None:
    """Check that a model gets the tensors `expected` from the file."""
    model = lenet(2)
    load_weights(model, str(path), num_classes=NUM_CLASSES)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("write", [write_torch, write_old_torch])
@pytest.mark.parametrize("kind", FILES)
def test_the_weights_of_other_scripts_are_found(
    kind: str, write: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    state = lenet(0).state_dict()
    write(FILES[kind](state), tmp_path / "weights.bin")
    check(tmp_path / "weights.bin", state)


@pytest.mark.parametrize("kind", ["arrays", "of detectron"])
def test_a_plain_pickle_of_arrays_is_read(kind: str, tmp_path: Path) -> None:
    state = lenet(0).state_dict()
    write_pickle(FILES[kind](state), tmp_path / "model.pkl")
    check(tmp_path / "model.pkl", state)


def test_numbers_of_8_bits_are_read(tmp_path: Path) -> None:
    """torch.save writes the storage of newer types as bytes."""
    state = {name: value.to(torch.float8_e5m2) for name, value in lenet(0).state_dict().items()}
    write_torch(state, tmp_path / "weights.pth")
    check(tmp_path / "weights.pth", {name: value.float() for name, value in state.items()})


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_a_file_is_known_by_its_content_and_not_by_its_name(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = lenet(0).state_dict()
    save_file(state, tmp_path / name)
    check(tmp_path / name, state)


def test_the_log_says_what_was_taken_and_what_was_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_torch(FILES["of Lightning"](lenet(0).state_dict()), tmp_path / "last.ckpt")
    with caplog.at_level(logging.INFO):
        check(tmp_path / "last.ckpt", lenet(0).state_dict())
    [text] = caplog.messages
    assert text == (
        f"loaded 8 tensors from {tmp_path}/last.ckpt (key state_dict, prefix model.); randomly"
        " initialized: none; not used: loss.weight, metric.total"
    )


def torchscript() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(lenet(0).eval(), torch.zeros(1, 1, 28, 28)), buffer)
    return buffer.getvalue()


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def with_bias(change: Callable[[Tensor], Tensor]) -> State:
    """Return weights with a change of one tensor."""
    state = lenet(0).state_dict()
    return {**state, "0.bias": change(state["0.bias"])}


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a model": (
        lambda: saved(lenet(0)),
        r"has a whole model \(.*LeNet\), .*python -c .*torch.load\('.*file', "
        r"weights_only=False\).state_dict\(\), 'weights.pth'\)\"",
    ),
    "a model under a key": (
        lambda: saved({"epoch": 3, "model": lenet(0)}),
        r"has a whole model \(.*LeNet\)",
    ),
    "a model in a file of torch < 1.6": (
        lambda: saved(lenet(0), _use_new_zipfile_serialization=False),
        r"has a whole model \(.*LeNet\)",
    ),
    "TorchScript": (torchscript, r"TorchScript program.*torch.jit.load\('.*file'\).state_dict"),
    "nothing": (lambda: b"", "cannot be read"),
    "text": (lambda: b"conv1.weight\n", "cannot be read"),
    "a part of a file": (lambda: saved(lenet(0).state_dict())[:2000], "cannot be read"),
    "another archive": (lambda: b"PK\x05\x06" + 18 * b"\0", "cannot be read"),
    "a list": (lambda: saved([torch.ones(3)]), "has no weights"),
    "numbers": (lambda: saved({"epoch": 3}), "has no weights"),
    "a text": (lambda: pickle.dumps("weights"), "has no weights"),
    "other layers": (lambda: saved({"other": torch.ones(3)}), "does not match the model"),
    "a layer more": (
        lambda: saved({**lenet(0).state_dict(), "more.weight": torch.ones(3)}),
        "does not match the model.*more.weight",
    ),
    "a layer less": (
        lambda: saved(dict(list(lenet(0).state_dict().items())[1:])),
        "does not match the model",
    ),
    "a weight that is NaN": (lambda: saved(with_bias(lambda bias: bias * math.nan)), "0.bias.*NaN"),
    "a weight too large for float32": (
        lambda: saved(with_bias(lambda bias: torch.full_like(bias, 1e300, dtype=torch.float64))),
        "0.bias.*infinite",
    ),
    "whole numbers": (lambda: saved(with_bias(Tensor.char)), "0.bias is torch.int8"),
    "whole numbers of a newer type": (
        lambda: saved(with_bias(lambda bias: bias.abs().to(torch.uint16))),
        "0.bias is torch.uint16",
    ),
    "complex numbers": (
        lambda: saved(with_bias(lambda bias: bias.to(torch.complex64))),
        "0.bias is torch.complex64",
    ),
    "numbers in place of a tensor": (
        lambda: saved(dict.fromkeys(lenet(0).state_dict(), 0.0)),
        "has no weights",
    ),
}


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning"
)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_used_is_one_error(kind: str, tmp_path: Path) -> None:
    write, message = REFUSED[kind]
    (tmp_path / "file").write_bytes(write())
    with pytest.raises(ConfigError, match=message):
        load_weights(lenet(2), str(tmp_path / "file"), num_classes=NUM_CLASSES)


RUN: list[Callable[..., Any]] = [Path.write_text, eval, exec, getattr, print]


@pytest.mark.parametrize("write", [write_torch, write_old_torch, write_pickle])
@pytest.mark.parametrize("function", RUN, ids=lambda function: function.__name__)
def test_nothing_in_a_file_is_executed(
    function: Callable[..., Any], write: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    marker = tmp_path / "executed"
    code = f"open({str(marker)!r}, 'w')"
    arguments: Any = {Path.write_text: (marker, "x"), getattr: (marker, "touch"), print: ()}

    class Executed:
        def __reduce__(self) -> Any:
            return (function, arguments.get(function, (code,)))

    state = lenet(0).state_dict()
    write({"model": arrays(state), "args": Executed()}, tmp_path / "weights.pth")
    check(tmp_path / "weights.pth", state)
    assert not marker.exists()


SET_ATTRIBUTES = {
    "a function": ("torch._utils", "_rebuild_tensor_v2", "__defaults__"),
    "Counter": ("collections", "Counter", "update"),
    "Tensor": ("torch", "Tensor", "__repr__"),
    "Parameter": ("torch.nn.parameter", "Parameter", "__repr__"),
    "OrderedDict": ("collections", "OrderedDict", "update"),
    "ndarray": ("numpy", "ndarray", "sum"),
}


@pytest.mark.parametrize("kind", SET_ATTRIBUTES)
def test_a_pickle_changes_no_class_and_no_function(kind: str, tmp_path: Path) -> None:
    """The opcode BUILD, b, sets attributes of the object below it, here to None."""
    module, name, attribute = SET_ATTRIBUTES[kind]
    found = getattr(importlib.import_module(module), name)
    before = getattr(found, attribute)
    path = tmp_path / "weights.pkl"
    key = f"X{len(attribute):c}\0\0\0{attribute}"
    path.write_bytes(f"\x80\x02c{module}\n{name}\nN}}({key}Nu\x86b.".encode("latin-1"))
    with pytest.raises(ConfigError):
        find_weights(path, {})
    assert getattr(found, attribute) is before


def pickled_array(kind: str) -> bytes:
    """Return a pickle that makes an object array of chosen addresses, and uses it."""
    made = f"cnumpy\nndarray\n((I1\ntV{kind}\nC\x08AAAAAAAAtR"
    return f"\x80\x02cbuiltins\nset\n({made}tR.".encode("latin-1")


def cyclic() -> bytes:
    content: dict[str, Any] = {"w": np.zeros(3)}
    content |= {f"k{number}": content for number in range(200)}
    return pickle.dumps(content)


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("storages"))
    return buffer.getvalue()


def nested(share: str) -> bytes:
    """Return a pickle of a dict with a key whose hash takes 2**60 steps: (a, a) of (b, b) of …"""
    return f"\x80\x02}}){share * 60}K\x01s.".encode("latin-1")


def compressed() -> bytes:
    """Return a file of torch.save whose members are compressed: 1 MB may become 1 GB."""
    buffer = io.BytesIO()
    whole = zipfile.ZipFile(io.BytesIO(saved(lenet(0).state_dict())))
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in whole.namelist():
            archive.writestr(name, whole.read(name))
    return buffer.getvalue()


def with_two_lists() -> bytes:
    """Return an archive with two lists of members: zipfile finds the second, and torch the first.

    The second has one harmless member, and a comment that makes it as long as the first.
    """
    whole = saved(lenet(0).state_dict())
    names = zipfile.ZipFile(io.BytesIO(whole)).namelist()
    begin = zipfile.ZipFile(io.BytesIO(whole)).start_dir
    first = whole[begin : whole.index(b"PK\x06\x06", begin)]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    other = buffer.getvalue()
    place = zipfile.ZipFile(buffer).start_dir
    second = bytearray(other[place:-22])
    comment = len(first) - len(second)
    struct.pack_into("<H", second, 32, comment)
    numbers = (0, 0, len(names), len(names), len(first), begin, 0)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", *numbers)
    # the distance from the first list to its copy is the length of first and member
    struct.pack_into("<L", second, 42, begin - place)
    return whole[:begin] + first + other[:place] + bytes(second) + bytes(comment) + end


def with_module(kind: bytes, folder: Path) -> bytes:
    """Return a file of torch < 1.6 for which torch writes attack.patch in `folder`, from text.

    kind: a pickle that makes the first item of the saved id.
    """
    name = str(folder / "attack")
    attributes = {"__module__": "collections", "__qualname__": "Counter", "__name__": name}
    setting = b"(" + pickled("dump_patches") + b"\x88"  # True
    setting += b"".join(pickled(word) for item in attributes.items() for word in item)
    counter = b"\x80\x02ccollections\nCounter\nq\x00N}" + setting + b"u\x86b0"
    module = b"(" + kind + b"h\x00" + pickled("any text\n") + pickled("x\n") + b"tQ0}."
    head = [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {}]
    return b"".join(pickle.dumps(value, 2) for value in head) + counter + module + pickle.dumps([])


def pickled(text: str) -> bytes:
    """Return the opcode that puts a text on the stack, BINUNICODE."""
    return b"X" + struct.pack("<I", len(text)) + text.encode()


MODULE_IDS = {
    "a text": pickled("module"),
    "bytes": b"c_codecs\nencode\n(" + pickled("module") + pickled("latin1") + b"tR",
    # an object of a class that is equal to any text
    "an object": b"ccollections\nCounter\nq\x01N}" + pickled("__eq__") + b"cbuiltins\nslice\ns"
    b"\x86b)R",
}


@pytest.mark.parametrize("kind", MODULE_IDS.values(), ids=MODULE_IDS)
def test_a_file_writes_no_file(kind: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(with_module(kind, tmp_path))
    with pytest.raises(ConfigError, match="has no weights"):
        load_weights(lenet(0), str(tmp_path / "file"), num_classes=10)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_long_names_are_read_in_seconds(tmp_path: Path) -> None:
    state = lenet(0).state_dict()
    write_torch({"." * 1_000_000: torch.ones(1), **prefixed("module.", state)}, tmp_path / "file")
    began = time.process_time()
    assert find_weights(tmp_path / "file", {n: v.shape for n, v in state.items()}).source
    assert time.process_time() - began < 5


HOSTILE = {
    "compressed": compressed(),
    "two lists": with_two_lists(),
    "objects": pickled_array("O"),
    "void": pickled_array("V8"),
    "tar": archive(),
    "cyclic": cyclic(),
    "long double": pickle.dumps(np.longdouble(1)),
    "pairs of one twice": nested("2\x86"),  # DUP, TUPLE2
    "pairs from the memo": nested("q\x00h\x00\x86"),
    "triples from the memo": nested("q\x000(g0\ng0\ng0\nt"),  # POP, MARK, GET
    "one beside an unused state": nested("NbNb2\x86"),  # BUILD without a state
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_one_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.weights="):
        load_weights(lenet(0), str(tmp_path / "file"), num_classes=10)
