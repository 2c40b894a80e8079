"""compile=true trains the same, compiles one graph, and says what it needs."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from runs import TINY, compose, records
from torch import nn

from ddp_trainer import ModelConfig, register_model
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.training import loop
from ddp_trainer.training_run import run

FP32 = (*TINY, "precision=fp32", "log_every_steps=1", "optimizer.lr=0.01")


@dataclass
class SmallConfig(ModelConfig):
    """A model of few kernels, because LeNet takes a minute to compile."""

    name: str = "small"


def build_small(
    config: SmallConfig, *, image_shape: tuple[int, int, int], num_classes: int
) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(image_shape), num_classes), nn.ReLU())


def _train_both(folder: str) -> tuple[int, int]:
    """Train eagerly and compiled; return how many graphs were compiled before the first step, and
    in all.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config as inductor

    # because the headers take longer to compile than these few kernels
    inductor.cpp_cache_precompile_headers = False
    inductor.cpp.vec_isa_ok = True  # which a compilation would find out
    register_model("small", SmallConfig, build_small)
    # 6 images of a rank in 4 passes: 2, 2, 1 and 1
    words = (*FP32, "model=small", f"output_dir={folder}", "gradient_accumulation_steps=4")
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


def test_compiled_training_is_the_same_and_compiles_each_batch_size_once(tmp_path: Path) -> None:
    assert on_ranks(2, _train_both, str(tmp_path), deadline=240) == [(2, 2)] * 2
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
