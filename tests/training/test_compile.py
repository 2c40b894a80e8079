"""compile=true trains the same, compiles one graph, and says what it needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from runs import TINY, compose, records

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.training import loop
from ddp_trainer.training_run import run

FP32 = (*TINY, "precision=fp32", "log_every_steps=1", "optimizer.lr=0.01")


def _train_both(folder: str, passes: int) -> tuple[int, int]:
    """Train eagerly and compiled; return how many graphs were compiled before the first step, and
    in all.
    """
    from torch._dynamo.utils import counters

    words = (*FP32, f"output_dir={folder}", f"gradient_accumulation_steps={passes}")
    prime = loop.prime
    early = 0

    def count(*arguments: Any) -> None:
        nonlocal early
        prime(*arguments)
        early = counters["stats"]["unique_graphs"]

    loop.prime = count
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        run(compose(*words, f"name={name}", f"compile={compiled}"))
    return early, counters["stats"]["unique_graphs"]


# 6 images of a rank, or 2, 2, 1 and 1
@pytest.mark.parametrize(("passes", "sizes"), [(1, 1), (4, 2)])
def test_compiled_training_is_the_same_and_compiles_once(
    passes: int, sizes: int, tmp_path: Path
) -> None:
    assert on_ranks(2, _train_both, str(tmp_path), passes, deadline=240) == [(sizes, sizes)] * 2
    for tag in ("train/loss", "eval/loss"):
        eager, compiled = (
            [record[tag] for record in records(tmp_path / name, tag)]
            for name in ("eager", "compiled")
        )
        assert len(eager) > 1
        assert compiled == pytest.approx(eager, rel=1e-4)


def test_without_a_compiler_compile_is_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(ConfigError, match="compile=true needs a C\\+\\+ compiler"):
        run(compose(*TINY, "compile=true", f"output_dir={tmp_path}"))
    torch.distributed.destroy_process_group()
