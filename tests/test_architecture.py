"""The layers hold: who may import whom, who imports torch, who reads the launcher's variables."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_trainer

PACKAGE = Path(ddp_trainer.__file__).parent
LAYERS = (
    ("schemas", "config", "composition", "environment", "memory", "files", "seeding", "network", "distributed"),
    ("data", "models", "optim", "sync", "checkpoint", "interrupt", "metrics", "writer", "log", "run_dir",
     "summary", "watch", "explain", "timeline", "costs", "flops", "rollcall"),
    ("trainer", "prediction", "start"),
    ("run",),
    ("command_line", "trial"),
    ("calibration",),
    ("agent", "benchmark", "doctor", "job", "plan", "preflight", "verify"),
    ("launchers",),
    ("__main__",),
)  # fmt: skip
"""Rooms, a module or a package each, from the ground up. Layer 0 is in the order in which it may import itself."""

LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
LAUNCHER_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID",
}  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    """All modules but the front door, ddp_trainer/__init__.py, which only names what is public."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported_names(path: Path) -> set[str]:
    """Every module that `path` imports, at its top or inside a function, as ``package.module.name``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_rooms(path: Path) -> set[str]:
    ours = {name.split(".")[1] for name in imported_names(path) if name.startswith("ddp_trainer.")}
    return ours - {"__version__"}


def may_import(room: str, other: str) -> bool:
    if LAYER_OF[room] == LAYER_OF[other] == 0:
        return LAYERS[0].index(other) < LAYERS[0].index(room)
    return LAYER_OF[other] < LAYER_OF[room]


def test_every_module_has_its_layer() -> None:
    assert {room_of(path) for path in modules()} == set(LAYER_OF), "LAYERS and the package name different modules"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_lower_layers_only(path: Path) -> None:
    room = room_of(path)
    assert room in LAYER_OF, f"{room} has no layer: give it one in LAYERS"
    wrong = {other for other in imported_rooms(path) - {room} if not may_import(room, other)}
    assert not wrong, f"{room} is of layer {LAYER_OF[room]} and imports {sorted(wrong)}"


def test_only_environment_names_the_launchers_variables() -> None:
    readers = {
        room_of(path)
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in LAUNCHER_VARIABLES
    }
    assert readers == {"environment"}


def test_the_command_line_imports_no_torch_before_the_config_is_good() -> None:
    code = "import ddp_trainer.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("room", ["config", "composition", "environment", "files", "explain"])
def test_modules_that_answer_at_once_import_no_torch(room: str) -> None:
    heavy = {name for name in imported_names(PACKAGE / f"{room}.py") if name.split(".")[0].startswith("torch")}
    assert not heavy
