"""A command's own options: ``key=value`` like the config, declared as a dataclass."""

import ast
import inspect
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf, StringNode

T = TypeVar("T")


def parse_options(schema: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    """Return the options among `words`, as a `schema` object, and the other words.

    Raises:
        OmegaConfBaseException: a value is of another type.
    """
    names = {field.name for field in fields(cast(Any, schema))}
    own = [word for word in words if "=" in word and word.partition("=")[0] in names]
    tree = OmegaConf.structured(schema)
    for key, _, text in (word.partition("=") for word in own):
        is_text = isinstance(tree._get_node(key), StringNode)  # a path, for example: not to be read as YAML
        tree[key] = text if is_text else OmegaConf.from_dotlist([f"{key}={text}"])[key]
    return cast(T, OmegaConf.to_object(tree)), [word for word in words if word not in own]


def print_help(usage: str, description: str, schema: type) -> None:
    """Print a command's usage and its options with their defaults."""
    print(f"usage: {usage}\n\n{description.strip()}\n\noptions (key=value):\n{list_fields(schema())}")


def list_fields(section: Any, *, prefix: str = "", skip: Collection[str] = ()) -> str:
    """Return a line for each key of a dataclass object and of those inside it: key, value and description."""
    texts, lines = field_docstrings(type(section)), []
    for field in fields(section):
        value = getattr(section, field.name)
        if field.name in skip:
            continue
        if is_dataclass(value):
            lines.append(list_fields(value, prefix=f"{prefix}{field.name}."))
            continue
        is_list = isinstance(value, list)
        items = [OmegaConf.to_yaml([item]).removeprefix("- ").strip() for item in (value if is_list else [value])]
        shown = f"[{','.join(items)}]" if is_list else items[0]
        first_line = texts.get(field.name, "").partition("\n")[0]
        lines.append(f"  {f'{prefix}{field.name}={shown}':44} {first_line}".rstrip())
    return "\n".join(lines)


def field_docstrings(schema: type) -> dict[str, str]:
    """Return the string literal that stands below each field of a dataclass and of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(schema.__mro__[:-1]):
        [tree] = ast.parse(inspect.cleandoc(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts[ast.unparse(node.target)] = inspect.cleandoc(str(after.value.value))
    return texts


def wants_help(words: Sequence[str]) -> bool:
    """Return whether the words ask for help."""
    return any(word in ("--help", "-h") for word in words)


def program() -> str:
    """Return the name of the program as it was called."""
    return "ddp-trainer" if sys.argv[0].endswith("ddp-trainer") else "python -m ddp_trainer"
