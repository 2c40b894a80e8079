"""Reads files of weights, and finds the tensors of a model in them; nothing in a file is executed.

Training scripts save a state dict in many ways: under a key, beside their arguments and the state
of the optimizer, or with a prefix that a wrapper has added to all names. `find_weights` takes the
state dict and the prefix that fit a model best.
"""

import importlib
import os
import pickle
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, one_line, require
from ddp_trainer.files import check_archive, check_pickle
from ddp_trainer.models.plain_arrays import STAND_INS, PlainArray

State = dict[str, Tensor]

MAX_DEPTH = 4
"""How many keys may lead to a state dict, as in ``file["checkpoint"]["model"]``."""
MAX_PREFIXES = 10
"""How many prefixes are tried for each state dict, those of most names."""
AVERAGES = ("ema", "average", "swa")
"""Parts of a key that mark averaged weights, which are preferred if both kinds fit."""
ALLOWED = {
    "_codecs": ["encode"],
    "builtins": ["complex", "slice"],
    "collections": ["OrderedDict", "defaultdict", "Counter", "deque"],
    "torch": ["Size", "Tensor", "device"],
    "torch._tensor": ["_rebuild_from_type_v2"],
    "torch._utils": [
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
    ],
    "torch.nn.parameter": ["Buffer", "Parameter"],
}
"""The classes and functions that a file may name: only those of tensors, arrays and containers."""

HEAP_TYPE = 1 << 9
"""The flag of a class whose attributes can be set."""


class Inert:
    """Stands for an object of any other class. It holds what the file has of it, and does nothing.

    A file may contain such objects beside its weights, for example the arguments of a script.
    """

    origin = "an object"
    """The name of the class in the file."""
    state: Any = None
    """What the file has for ``__setstate__``."""
    items: dict[Any, Any]
    """The items of a mapping."""

    def __new__(cls, *_: Any, **__: Any) -> "Inert":
        new = super().__new__(cls)
        new.items = {}
        return new

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "Inert":
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, item: Any) -> None:
        """Items of a list or set are not kept."""

    extend = add = append


class InertStorage(Inert):
    """Stands for torch.UntypedStorage, in which torch.save writes tensors of float8 or uint16."""

    dtype = torch.uint8
    """The type of its elements, which torch.load reads."""


class InertUnpickler(pickle.Unpickler):
    """An unpickler that makes an `Inert` object of every class which `ALLOWED` does not have."""

    def __init__(self, file: BinaryIO, **options: Any) -> None:
        start = file.tell()
        check_pickle(file)
        file.seek(start)
        super().__init__(file, **options)

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy"):
            stand_in = STAND_INS.get((module.rpartition(".")[2], name))
            if stand_in is not None:
                return guarded(stand_in)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ALLOWED.get(module, ()):
            return guarded(getattr(importlib.import_module(module), name))
        base = InertStorage if (module, name) == ("torch.storage", "UntypedStorage") else Inert
        return type(name, (base,), {"origin": f"{module}.{name}"})

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; torch sets `persistent_load`, which gets only ids of storages."""
        super().__setattr__(name, without_modules(value) if name == "persistent_load" else value)


def without_modules(persistent_load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a `persistent_load` that passes only ids of storages to the one of torch.

    Of the id of a module it returns the class. torch would also compare the source of the class,
    and write the difference to a file whose path is the name of the class, which a pickle can set.
    """

    def load_storage(saved_id: Any) -> Any:
        kind = saved_id[0]
        # the types too, because a class of the pickle may be equal to any text
        is_storage = type(kind) in (str, bytes) and kind in ("storage", b"storage")
        return persistent_load(saved_id) if is_storage else saved_id[1]

    return load_storage


def guarded(found: Any) -> Any:
    """Return a stand-in for `found`, a class or function, which a pickle can change without effect.

    A pickle can set attributes of each object that it names, and so of a function or a class.
    """
    if not isinstance(found, type):
        return found if isinstance(found, torch.dtype) else lambda *args: found(*args)
    is_builtin = not found.__flags__ & HEAP_TYPE  # its attributes cannot be set
    return found if is_builtin else type(found.__name__, (found,), {})


INERT_PICKLE: Any = SimpleNamespace(
    Unpickler=InertUnpickler,
    load=lambda file, **options: InertUnpickler(file, **options).load(),
    __name__="inert_pickle",
)
"""In place of the module ``pickle``, for torch.load."""


class Weights(NamedTuple):
    """The tensors of a model in a file."""

    state: State
    """The tensors by the names that they have in the model."""
    source: str
    """Where they are in the file, for messages: the keys that lead to them, and the prefix."""
    unused: list[str]
    """Other tensors beside them, by their names in the file."""


def find_weights(path: Path, shapes: Mapping[str, torch.Size]) -> Weights:
    """Return the tensors in a file that fit a model best.

    shapes: the shapes of the tensors of the model by name.

    Raises:
        ConfigError: the file cannot be read, or has no state dict.
    """
    content = read_content(path)
    sections = dict(find_sections(content))
    require(
        bool(sections),
        f"model.weights={path} has no weights: it must have a dict of tensors by name, like a"
        " state_dict",
    )

    def rank(candidate: tuple[str, str]) -> tuple[int, bool]:
        section, prefix = candidate
        tensors = sections[section]
        names = (name.removeprefix(prefix) for name in tensors if name.startswith(prefix))
        fitting = sum(
            name in shapes and tensors[prefix + name].shape == shapes[name] for name in names
        )
        return fitting, any(part in section.lower() for part in AVERAGES)

    candidates = [
        (section, prefix)
        for section, tensors in sections.items()
        for prefix in prefixes(tensors, shapes)
    ]
    section, prefix = max(candidates, key=rank)
    tensors = sections[section]
    places = [f"key {section}"] * bool(section) + [f"prefix {prefix}"] * bool(prefix)
    return Weights(
        state={
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        },
        source=f" ({', '.join(places)})" if places else "",
        unused=[name for name in tensors if not name.startswith(prefix)],
    )


def prefixes(tensors: State, shapes: Mapping[str, torch.Size]) -> list[str]:
    """Return the prefixes that wrappers may have added to the names in a state dict, and "".

    For example, DDP adds ``module.``, Lightning ``model.``, and torch.compile ``_orig_mod.``.
    """
    found: Counter[str] = Counter()
    longest = max(map(len, shapes), default=0)
    for name in tensors:
        first = max(0, len(name) - longest - 1)  # a dot before it is followed by too long a name
        ends = [place + 1 for place in range(first, len(name)) if name[place] == "."]
        found.update(name[:end] for end in ends if name[end:] in shapes)
    return sorted({"", *(prefix for prefix, _ in found.most_common(MAX_PREFIXES))})


def find_sections(
    content: Any, path: tuple[str, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[str, State]]:
    """Yield each dict in `content` that has tensors, once, and the keys that lead to it.

    seen: the ids of the dicts that were looked at, because a dict may contain itself.
    """
    seen = set() if seen is None else seen
    if isinstance(content, Inert):
        content = content.items
    if not isinstance(content, Mapping) or len(path) > MAX_DEPTH or id(content) in seen:
        return
    seen.add(id(content))
    tensors = {
        name: as_tensor(value)
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor | PlainArray)
    }
    state = {name: value for name, value in tensors.items() if value is not None}
    if state:
        yield ".".join(path), state
    for key, value in content.items():
        yield from find_sections(value, (*path, str(key)), seen)


def as_tensor(value: Tensor | PlainArray) -> Tensor | None:
    """Return a tensor or an array as a tensor; None if torch has no such numbers."""
    if isinstance(value, Tensor):
        return value.detach()
    array = value.array
    if array is None or array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        return None
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def read_content(path: Path) -> Any:
    """Return the content of a file of torch.save, safetensors or pickle.

    Raises:
        ConfigError: the file cannot be read, or has a whole model in place of its weights.
    """
    require(
        os.path.isfile(path) or not os.path.exists(path),
        f"model.weights={path} is not a regular file: give a file",
    )
    try:
        if tarfile.is_tarfile(path):  # which torch would unpack, with links and rights
            raise ValueError("an archive of torch before 0.1.10")
        with open(path, "rb") as file:
            head = file.read(9)
        if head[8:] == b"{":
            from safetensors.torch import load_file  # installed only with the extra `timm`

            return load_file(path)
        if head.startswith(b"PK"):
            refuse_torchscript(path)
            with open(path, "rb") as file:
                check_archive(file)
            content = load(path)
        else:
            with open(path, "rb") as file:
                content = InertUnpickler(file).load()
            if content == torch.serialization.MAGIC_NUMBER:  # a file of torch before 1.6
                content = load(path)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.weights={path} needs safetensors: pip install 'ddp_trainer[timm]'"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # a file that is not a checkpoint may raise anything
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(
            f"model.weights={path} cannot be read ({reason}): give a file saved by torch.save or a"
            " .safetensors file"
        ) from error
    values = [content, *(content.values() if isinstance(content, Mapping) else ())]
    for value in values:
        has_state = isinstance(value, Inert) and isinstance(value.state, Mapping)
        if has_state and "_parameters" in value.state:
            refuse_model(path, value.origin, load="torch.load({}, weights_only=False)")
    return content


def load(path: Path) -> Any:
    """Return the content of a file of torch.save."""
    return torch.load(path, map_location="cpu", pickle_module=INERT_PICKLE, weights_only=False)


def refuse_torchscript(path: Path) -> None:
    """Raise ConfigError if a zip file has a TorchScript program."""
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            refuse_model(path, "a TorchScript program", load="torch.jit.load({})")


def refuse_model(path: Path, kind: str, *, load: str) -> None:
    """Raise ConfigError with the command that saves the weights of the model in a file."""
    command = f"torch.save({load.format(repr(str(path)))}.state_dict(), 'weights.pth')"
    raise ConfigError(
        f"model.weights={path} has a whole model ({kind}), and not only its weights: if you trust"
        " the file, run this (where the model's own code is installed, unless it is a TorchScript"
        " program), and set model.weights=weights.pth:"
        f' python -c "import torch; {command}"'
    )
