"""The options of a command: ``key=value`` like the config, declared as fields of a dataclass."""

import ast
import inspect
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin, get_type_hints

from omegaconf import OmegaConf

from ddp_trainer.config.errors import check_values, config_class, require
from ddp_trainer.config.keys import parse_value

T = TypeVar("T")


@config_class
class CheckpointOptions:
    """The options that evaluate, export and predict have in common."""

    checkpoint: str = "best"
    """best (the best value of select_by), last (the newest), or the number of a step."""


def output_folder(option: str | None, default: Path) -> Path:
    """Return the folder that the option `output` chooses; ConfigError if it is empty."""
    require(option != "", "output= is empty: name a folder, or leave output out")
    return default if option is None else output_path(option)


def output_path(option: str) -> Path:
    """Return the path that the option `output` chooses; ConfigError if its user is unknown."""
    path = os.path.expanduser(option)
    require(
        not path.startswith("~"),
        f"output={option} begins with ~ of an unknown user: give a full path",
    )
    return Path(path)


def parse_options(
    schema: type[T], words: Sequence[str], *, usage: str = "", description: str | None = ""
) -> tuple[T, list[str]]:
    """Return a checked `schema` object with the options among `words`, and the other words.

    If `words` ask for help, print `usage`, `description` and all options with their defaults, and
    exit with 0.
    """
    if wants_help(words):
        print(f"usage: {program()} {usage}\n\n{(description or '').strip()}")
        print(f"\noptions (key=value):\n{list_fields(with_defaults(schema))}")
        sys.exit()
    hints = get_type_hints(schema)
    tree = OmegaConf.structured(schema)
    others = []
    for word in words:
        key, equals, value = word.partition("=")
        name = key.lstrip("-")
        require(
            not (key.startswith("--") and name in hints),
            f"{word}: options have no dashes, {name}={value or 'VALUE'}",
        )
        if equals and key in hints:
            if get_origin(hints[key]) is list:  # so that key=a,b is the same as key=[a,b]
                word = f"{key}=[{value.strip('[]')}]"
            tree[key] = parse_value(word, hints[key])
        else:
            others.append(word)
    options = cast(T, OmegaConf.to_object(tree))
    check_values(options)
    return options, others


def split_paths(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths and the settings (key=value) among `words`.

    A path is taken for a setting if its first folder contains =, unless it begins with ./ or /.
    """
    overrides = [word for word in words if re.match(r"\+{0,2}[\w.@]+=", word)]
    return [word for word in words if word not in overrides], overrides


def list_fields(section: Any, *, prefix: str = "", skip: Collection[str] = ()) -> str:
    """Return a line (key, value, description) for each field of a dataclass object.

    A field that is itself a dataclass object is replaced by its fields. skip: names to leave out.
    """
    texts = field_docstrings(type(section))
    lines = []
    for name in [field.name for field in fields(section) if field.name not in skip]:
        value = getattr(section, name)
        if is_dataclass(value):
            lines.append(list_fields(value, prefix=f"{prefix}{name}."))
            continue
        items = value if isinstance(value, list) else [value]
        shown = ",".join(OmegaConf.to_yaml([item]).removeprefix("- ").strip() for item in items)
        if isinstance(value, list):
            shown = f"[{shown}]"
        description = " ".join(texts.get(name, "").partition("\n\n")[0].split())
        lines.append(f"  {f'{prefix}{name}={shown}':44} {description}".rstrip())
    return "\n".join(lines)


def with_defaults(schema: type[T]) -> T:
    """Return an unchecked `schema` object of default values; ``???`` where there is no default."""
    section = object.__new__(schema)
    for item in fields(cast(Any, schema)):
        value = "???" if item.default is MISSING else item.default
        if item.default_factory is not MISSING:
            value = item.default_factory()
        object.__setattr__(section, item.name, value)
    return section


def field_docstrings(schema: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its bases, by field name."""
    texts: dict[str, str] = {}
    for base in reversed(schema.__mro__[:-1]):
        [tree] = ast.parse(inspect.cleandoc(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for statements in pairwise(tree.body):
            match statements:
                case ast.AnnAssign(target=name), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[ast.unparse(name)] = inspect.cleandoc(text)
    return texts


def wants_help(words: Sequence[str]) -> bool:
    """Return whether `words` contain --help or -h."""
    return "--help" in words or "-h" in words


def program() -> str:
    """Return the command by which the user started this program, for usage lines."""
    return "ddp-trainer" if sys.argv[0].endswith("ddp-trainer") else "python -m ddp_trainer"
