"""A command's own options: ``key=value`` like the config, declared as a dataclass."""

import ast
import inspect
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast, get_type_hints

from omegaconf import OmegaConf

from ddp_trainer.config.errors import check_values
from ddp_trainer.config.keys import parse_value

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class CheckpointOptions:
    """The options that evaluate, export and predict have in common."""

    checkpoint: str = "best"
    """best (highest top-1), last (the newest), or the number of a step."""


def parse_options(
    schema: type[T], words: Sequence[str], *, usage: str = "", description: str | None = ""
) -> tuple[T, list[str]]:
    """Return the words that set a field of `schema` as a checked `schema` object, and the others.

    If `words` ask for help, print `usage`, `description` and all options with their defaults, and
    exit with 0.
    """
    if wants_help(words):
        print(f"usage: {program()} {usage}\n\n{(description or '').strip()}")
        print(f"\noptions (key=value):\n{list_fields(schema())}")
        sys.exit()
    hints = get_type_hints(schema)
    tree = OmegaConf.structured(schema)
    others = []
    for word in words:
        key, equals, _ = word.partition("=")
        if equals and key in hints:
            tree[key] = parse_value(word, hints[key])
        else:
            others.append(word)
    options = cast(T, OmegaConf.to_object(tree))
    check_values(options)
    return options, others


def split_paths(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths and the settings among `words`; a path with = must begin with ./ or /."""
    overrides = [word for word in words if re.match(r"\+{0,2}[\w.@]+=", word)]
    return [word for word in words if word not in overrides], overrides


def list_fields(section: Any, *, prefix: str = "", skip: Collection[str] = ()) -> str:
    """Return a line (key, value, description) for each field of an object and of its sections."""
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


def field_docstrings(schema: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its bases, by field."""
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
    """Return how the user has called this program, for usage lines."""
    return "ddp-trainer" if sys.argv[0].endswith("ddp-trainer") else "python -m ddp_trainer"
