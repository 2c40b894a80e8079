"""``launch()`` without a script, as in a notebook."""

import sys
from pathlib import Path

from processes import run_command

IN_A_NOTEBOOK = """
from own_loss import FocalConfig
from ddp_trainer import Config, launch
from ddp_trainer.config.models import LeNetConfig

config = Config(model=LeNetConfig(), loss=FocalConfig(), epochs=1, max_steps=2, output_dir="runs")
print("steps", launch(config, num_ranks=2).steps)
"""


def test_the_ranks_know_a_loss_from_a_module_that_a_notebook_imports(tmp_path: Path) -> None:
    examples = str(Path(__file__).parents[2] / "examples")
    command = [sys.executable, "-c", f"import sys; sys.path.append({examples!r}){IN_A_NOTEBOOK}"]
    done = run_command(command, cwd=tmp_path, deadline=200)
    assert done.code == 0, done.output
    assert "steps 2" in done.output
