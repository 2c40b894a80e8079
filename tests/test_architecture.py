"""The shape of the package: who imports whom, who reads the environment, how large things are, what starts at once."""

import ast
import functools
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import clean_environment

import ddp_trainer

PACKAGE = Path(ddp_trainer.__file__).parent
CONFIG, RANKS = {"registry", "config"}, {"registry", "config", "distributed"}
PARTS = {"data", "models", "sync", "checkpoint", "loggers", "performance"}
MAY_IMPORT = {
    "registry": set[str](),
    "config": {"registry"},
    "distributed": CONFIG,
    "data": RANKS,
    "models": CONFIG,
    "sync": RANKS,
    "checkpoint": RANKS,
    "loggers": RANKS,
    "performance": CONFIG,
    "training": RANKS | PARTS,
    "launch": RANKS | {"training"},
    "commands": RANKS | PARTS | {"training", "launch"},
    "__main__": RANKS | {"commands"},
}
"""The units of the package (top-level folders and modules) and those that each may import; no part imports another.

Each may import only units above it, so there is no cycle. Imports inside of functions count too.
"""

MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS, MAX_WHOLE_CONFIGS = 320, 45, 8, 8
LAUNCHER_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
}  # fmt: skip

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
"""All but ddp_trainer/__init__.py, which only names what is public."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def shown(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def name_of(path: Path) -> str:
    """Return the name of a module, ``ddp_trainer.data.dataset``."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> set[str]:
    """Return all that `path` imports, at its top or inside of a function, as ``package.module.name``."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}:{node.lineno} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def parameters_of(function: ast.FunctionDef) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


# --- imports --------------------------------------------------------------------------------------


def test_every_unit_has_its_place_and_its_purpose() -> None:
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES} == set(MAY_IMPORT)
    for folder in {path.parent for path in MODULES} - {PACKAGE}:
        purpose = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
        assert re.match(r"[A-Z].+\.", purpose), f"{shown(folder)}/__init__.py must begin with its purpose"


def test_the_allowed_imports_have_no_cycle() -> None:
    order = list(MAY_IMPORT)
    for unit, others in MAY_IMPORT.items():
        assert others <= set(order[: order.index(unit)])


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_a_module_imports_what_its_unit_may(path: Path) -> None:
    unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    units = {name.split(".")[1] for name in imported_names(path) if name.startswith("ddp_trainer.")}
    assert units - {unit, "__version__"} <= MAY_IMPORT[unit]


def test_modules_import_each_other_without_a_cycle() -> None:
    known = {name_of(path) for path in MODULES}
    graph = {
        name_of(path): {
            other for name in imported_names(path) for other in (name, name.rpartition(".")[0]) if other in known
        } - {name_of(path)}
        for path in MODULES
    }  # fmt: skip
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


# --- the environment ------------------------------------------------------------------------------


def test_only_environment_names_the_launchers_variables() -> None:
    readers = {
        shown(path) for path in MODULES for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and node.value in LAUNCHER_VARIABLES
    }  # fmt: skip
    assert readers == {"distributed/environment.py"}


def test_only_environment_reads_variables() -> None:
    def reads_variable(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            return ast.unparse(node.value) == "os.environ"
        return isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get")

    readers = {shown(path) for path in MODULES if any(map(reads_variable, ast.walk(tree_of(path))))}
    assert readers <= {"distributed/environment.py"}


# --- sizes ----------------------------------------------------------------------------------------


def test_modules_and_functions_are_short() -> None:
    long_modules = {shown(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: lines for name, lines in long_modules.items() if lines > MAX_MODULE_LINES} == {}
    long_functions = {
        f"{shown(path)}: {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for path, function in functions()
    }
    assert {name: lines for name, lines in long_functions.items() if lines > MAX_FUNCTION_LINES} == {}


def test_constructors_have_few_arguments() -> None:
    counts = {shown(path): len(parameters_of(node)) - 1 for path, node in functions() if node.name == "__init__"}
    assert {name: count for name, count in counts.items() if count > MAX_ARGUMENTS} == {}


def test_few_functions_take_the_whole_config() -> None:
    takers = [
        f"{shown(path)}: {function.name}"
        for path, function in functions()
        for parameter in parameters_of(function)
        if parameter.annotation is not None and "Config" in ast.unparse(parameter.annotation).split(" | ")
    ]
    assert len(takers) <= MAX_WHOLE_CONFIGS, "\n".join(takers)


# --- what starts at once --------------------------------------------------------------------------


def test_help_imports_no_torch_and_takes_less_than_a_second(without_torch: dict[str, str]) -> None:
    def seconds() -> float:
        began = time.perf_counter()
        command = [sys.executable, "-m", "ddp_trainer", "--help"]
        subprocess.run(command, env=clean_environment(**without_torch), timeout=60, check=True, capture_output=True)
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < 1


@pytest.mark.parametrize("unit", ["registry", "config", "distributed/environment.py"])
def test_what_answers_before_training_imports_no_torch(unit: str) -> None:
    place = PACKAGE / unit
    for path in place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        assert not {name for name in imported_names(path) if name.split(".")[0].startswith("torch")}


# --- the README -----------------------------------------------------------------------------------


def test_the_reading_order_names_every_folder_and_only_what_exists() -> None:
    """The way from a config to a step first: at most 2,500 lines, which are read in an hour."""
    order = (PACKAGE.parent / "README.md").read_text().partition("## Reading order")[2]
    names = re.findall(r"`([\w/]+(?:/|\.py))`", order)
    assert all((PACKAGE / name).exists() for name in names)
    assert {f"{path.parent.relative_to(PACKAGE).parts[0]}/" for path in MODULES if path.parent != PACKAGE} <= set(names)
    path = [PACKAGE / name for name in names if name.endswith(".py")]
    assert sum(len(module.read_text().splitlines()) for module in path) <= 2500
