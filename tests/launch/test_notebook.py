"""`launch` in a real Jupyter kernel: progress, interrupts, kills, and what a cell shows."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from processes import EXAMPLES, clean_environment, processes_with, wait_for, with_path
from runs import TINY, assert_bitwise, newest_step, read_summary, train_on, trained_state

CHAOS = Path(__file__).parents[1] / "chaos"
PREPARE = f"""
import pacing
from ddp_trainer import Config, launch, load
config = Config.compose(*{TINY}, "epochs=3", "observer=[pace]", "checkpoint.every_steps=1")
"""
"""Three epochs of eight steps, each of which takes 0.1 s."""


def variables(**extra: str) -> dict[str, str]:
    """Return the environment of a kernel, which shows what other processes print only if it does
    not know of pytest.
    """
    environment = clean_environment(PYTHONPATH=with_path(EXAMPLES, CHAOS), **extra)
    return {name: environment[name] for name in environment.keys() - {"PYTEST_CURRENT_TEST"}}


class Notebook:
    """A kernel in a folder, whose processes all have a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"THIS_TEST={folder}"
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(folder), env=variables(THIS_TEST=str(folder)))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, *, on_text: Callable[[str], None] = lambda text: None) -> str:
        """Run a cell, return all that it has printed or shown; `on_text` gets the text so far."""
        printed = ""

        def add(message: dict[str, Any]) -> None:
            nonlocal printed
            content = message["content"]
            match message["header"]["msg_type"]:
                case "stream":
                    printed += content["text"]
                case "error":
                    printed += "\n".join(content["traceback"])
                case "execute_result":
                    printed += content["data"].get("text/html", content["data"]["text/plain"])
            on_text(printed)

        self.client.execute_interactive(code, timeout=120, output_hook=add)
        return printed

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()  # also those of a kernel that was killed
        for pid in processes_with(self.mark):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.close()


def test_the_example_runs_and_shows_the_curves(tmp_path: Path) -> None:
    cells = (EXAMPLES / "notebook.py").read_text().split("# %%\n")[1:]
    pages = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    pages.cells.append(nbformat.v4.new_code_cell("classifier"))
    client = NotebookClient(pages, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=variables())
    *_, trained, opened, shown = pages.cells
    text = "".join(output.text for output in trained.outputs)
    assert "top-1 0." in text
    assert "epoch" in text
    assert "'0', '1', '2'" in opened.outputs[0].text
    assert "<svg" in shown.outputs[0].data["text/html"].replace("&lt;", "<")


def test_an_interrupted_cell_is_saved_and_goes_on(notebook: Notebook, tmp_path: Path) -> None:
    run_dir = tmp_path / "outputs" / "synthetic-lenet-ddp"
    notebook.run(PREPARE)
    is_interrupted = False

    def interrupt(text: str) -> None:
        nonlocal is_interrupted
        if "epoch" in text and not is_interrupted and newest_step(run_dir):
            is_interrupted = True
            notebook.manager.interrupt_kernel()

    first = notebook.run("print(launch(config).status)", on_text=interrupt)
    assert first.rstrip().endswith("stopped"), first
    step = newest_step(run_dir)
    assert 0 < step < 24

    second = notebook.run("print(launch(config).status)")
    assert f"step-{step:08d}.pt" in second
    assert second.rstrip().endswith("finished"), second


@pytest.mark.fault("SIGKILL of the kernel of a notebook")
def test_no_rank_outlives_a_killed_kernel_and_the_run_goes_on_bit_by_bit(
    notebook: Notebook, tmp_path: Path
) -> None:
    run_dir = tmp_path / "outputs" / "synthetic-lenet-ddp"
    notebook.run(PREPARE)
    notebook.client.execute("launch(config)")
    wait_for(lambda: newest_step(run_dir))
    began = time.monotonic()
    notebook.manager.signal_kernel(signal.SIGKILL)
    wait_for(lambda: not processes_with(notebook.mark), seconds=10)
    assert time.monotonic() - began < 10
    assert not (run_dir / "summary.json").exists()

    again = Notebook(tmp_path)
    try:
        again.run(PREPARE)
        assert "resumed from" in again.run("launch(config)")
    finally:
        again.close()
    train_on(2, *TINY, "epochs=3", f"output_dir={tmp_path}", "name=whole")
    assert read_summary(run_dir)["status"] == "finished"
    assert_bitwise(trained_state(tmp_path / "whole"), trained_state(run_dir))


REGISTERS = """
from dataclasses import dataclass
from ddp_trainer import Config, LossConfig, launch, register_loss

@dataclass(kw_only=True)
class MineConfig(LossConfig):
    name: str = "mine"

register_loss("mine", MineConfig, builder="own_loss:build_focal")
launch(Config(model="lenet", loss="mine"))
"""


def test_what_a_cell_registers_is_refused_with_the_way_out(notebook: Notebook) -> None:
    printed = notebook.run(REGISTERS)
    assert "loss=mine is registered in a cell, which ranks cannot import: write it to" in printed
