"""The shape of the package: who imports whom, who reads the environment, how large things are, what
starts at once.
"""

import ast
import re
import resource
import subprocess
import sys
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from processes import clean_environment

import ddp_trainer

PACKAGE = Path(ddp_trainer.__file__).parent
LEAVES = {
    "version",
    "timing",
    "runtime",
    "cores",
    "progress",
    "registry",
    "config",
    "files",
    "output",
}
RANKS = LEAVES | {"distributed"}
PARTS = {"data", "models", "optim", "sync", "checkpoint"}
CORE = RANKS | PARTS | {"training"}
MAY_IMPORT = {
    "version": set[str](),
    "timing": set[str](),
    "runtime": set[str](),
    "cores": set[str](),
    "progress": set[str](),
    "registry": set[str](),
    "config": {"registry"},
    "files": {"config"},
    "output": {"config", "files"},
    "distributed": LEAVES,
    **dict.fromkeys(sorted(PARTS), RANKS),
    "training": RANKS | PARTS,
    "scores": CORE,
    "observers": CORE | {"scores"},
    "cuda_graphs": CORE,
    "async_step": CORE,
    "pipeline_step": CORE,
    "sharded_step": CORE,
    "start": CORE | {"async_step", "cuda_graphs", "pipeline_step", "sharded_step"},
    "schemas": {"config"},
    "public_config": RANKS,
    "recovery": CORE | {"observers"},
    "training_run": CORE
    | {"async_step", "observers", "public_config", "recovery", "sharded_step", "start"},
    "launchers": CORE | {"observers", "public_config", "start", "training_run"},
    "tools": CORE | {"scores", "observers", "start", "training_run", "launchers"},
    "commands": CORE | {"scores", "observers", "start", "training_run", "launchers", "tools"},
    "__main__": RANKS | {"commands"},
}
"""The units of the package (top-level folders and modules) and those that each may import; no part
imports another.

Each may import only units above it, so there is no cycle. Imports inside of functions count too.
"""

MEDIAN_TOKENS = 65
MANY_TOKENS = 170
"""The largest median, and 90th percentile, of the tokens of a function."""
MAX_REACHED_MODULES = 40
MAX_REACHED_LINES = 5_000
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
MAX_ARGUMENTS = 8
MAX_WHOLE_CONFIGS = 8
LAUNCHER_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
}

MODULES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}
"""The syntax trees of all modules but ddp_trainer/__init__.py, which only names what is public."""
FUNCTIONS = [
    (f"{name}: {node.name}", node)
    for name, tree in MODULES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef)
]


def unit_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def dotted(name: str) -> str:
    """Return the module's name as an import has it, ``ddp_trainer.data.dataset``."""
    return ".".join(["ddp_trainer", *name.removesuffix(".py").removesuffix("/__init__").split("/")])


def imported_names(tree: ast.Module) -> set[str]:
    """Return all that a module imports, at its top or inside of a function, as
    ``package.module.name``.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parameters_of(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


# --- imports --------------------------------------------------------------------------------------


def test_every_unit_has_its_place_and_its_purpose() -> None:
    assert set(map(unit_of, MODULES)) == set(MAY_IMPORT)
    for folder in {name.rpartition("/")[0] for name in MODULES} - {""}:
        purpose = ast.get_docstring(MODULES[f"{folder}/__init__.py"]) or ""
        assert re.match(r"[A-Z].+\.", purpose), f"{folder}/__init__.py must begin with its purpose"


def test_modules_import_what_their_unit_may_without_a_cycle() -> None:
    for number, others in enumerate(MAY_IMPORT.values()):
        assert others <= set(list(MAY_IMPORT)[:number])
    known = set(map(dotted, MODULES))
    graph = {}
    for name, tree in MODULES.items():
        imported = {other for other in imported_names(tree) if other.startswith("ddp_trainer.")}
        units = {other.split(".")[1] for other in imported} - {unit_of(name), "__version__"}
        assert units <= MAY_IMPORT[unit_of(name)], name
        graph[dotted(name)] = (
            imported | {other.rpartition(".")[0] for other in imported}
        ) & known - {dotted(name)}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("unit", ["registry", "config", "distributed/environment"])
def test_what_answers_before_training_imports_no_torch(unit: str) -> None:
    trees = [tree for name, tree in MODULES.items() if name.startswith((f"{unit}/", f"{unit}.py"))]
    assert trees
    assert not [
        name
        for tree in trees
        for name in imported_names(tree)
        if name.split(".")[0].startswith("torch")
    ]


# --- the environment ------------------------------------------------------------------------------


def test_only_environment_reads_variables_and_names_those_of_launchers() -> None:
    def reads_variable(node: ast.AST) -> bool:
        match node:
            case ast.Subscript(ctx=ast.Load()):
                return ast.unparse(node.value) == "os.environ"
            case ast.Call():
                return ast.unparse(node.func) in ("os.getenv", "os.environ.get")
            case ast.Constant():
                return node.value in LAUNCHER_VARIABLES
        return False

    readers = {name for name, tree in MODULES.items() if any(map(reads_variable, ast.walk(tree)))}
    assert readers == {"distributed/environment.py"}


# --- sizes ----------------------------------------------------------------------------------------


def tokens_of(name: str) -> list[tokenize.TokenInfo]:
    """Return the tokens of a module without comments, docstrings, blank lines and indentation."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    with (PACKAGE / name).open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    return [token for token in tokens if token.type not in LAYOUT and token.start not in docstrings]


def test_functions_have_few_tokens() -> None:
    """A limit on tokens cannot be kept by packing several statements into a line."""
    counts = []
    for name, tree in MODULES.items():
        tokens = tokens_of(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                counts.append(sum(token.start[0] in lines for token in tokens))
    counts.sort()
    assert counts[len(counts) // 2] <= MEDIAN_TOKENS
    assert counts[len(counts) * 9 // 10] <= MANY_TOKENS


def test_an_assignment_has_one_value() -> None:
    packed = [
        f"{name}:{node.lineno}"
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ]
    assert packed == []


def test_training_reaches_few_modules() -> None:
    """A reader of the training must read folder training/ and all that it imports."""
    graph = {dotted(name): name for name in MODULES}
    reached: set[str] = set()
    waiting = [module for module in graph if module.startswith("ddp_trainer.training.")]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            imported = imported_names(MODULES[graph[module]])
            names = imported | {name.rpartition(".")[0] for name in imported}
            waiting += names & graph.keys()
    modules = [name for name in map(graph.__getitem__, reached) if "__init__" not in name]
    lines = sum(len((PACKAGE / name).read_text().splitlines()) for name in modules)
    assert len(modules) <= MAX_REACHED_MODULES, "\n".join(sorted(modules))
    assert lines <= MAX_REACHED_LINES


def test_constructors_have_few_arguments_and_few_functions_take_the_whole_config() -> None:
    counts = {
        name: len(parameters_of(node)) - 1 for name, node in FUNCTIONS if node.name == "__init__"
    }
    assert {name: count for name, count in counts.items() if count > MAX_ARGUMENTS} == {}
    annotations = {
        name: {ast.unparse(p.annotation or p) for p in parameters_of(node)}
        for name, node in FUNCTIONS
    }
    takers = [name for name, types in annotations.items() if types & {"Config", "Config | None"}]
    assert len(takers) <= MAX_WHOLE_CONFIGS, "\n".join(takers)


# --- what starts at once --------------------------------------------------------------------------


def test_help_imports_no_torch_and_takes_less_than_a_second(without_torch: dict[str, str]) -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "ddp_trainer", "--help"]
        subprocess.run(
            command,
            env=clean_environment(**without_torch),
            timeout=60,
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 1


# --- the README -----------------------------------------------------------------------------------


def test_the_reading_order_names_every_folder_and_only_what_exists() -> None:
    """The way from a config to a step first: at most 2,500 lines, which are read in an hour."""
    order = (PACKAGE.parent / "README.md").read_text().partition("## Reading order")[2]
    names = re.findall(r"`([\w/]+(?:/|\.py))`", order)
    assert all((PACKAGE / name).exists() for name in names)
    assert {f"{unit_of(name)}/" for name in MODULES if "/" in name} <= set(names)
    path = [PACKAGE / name for name in names if name.endswith(".py")]
    assert sum(len(module.read_text().splitlines()) for module in path) <= 2500
