"""Ranks with different programs or settings: all of them report it, right after they have
joined.
"""

import sys
from pathlib import Path

import pytest
from processes import on_ranks
from runs import TINY, compose

from ddp_trainer import start
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.process_group import shutdown
from ddp_trainer.training_run import run


def refusal(override: str, torchvision: str | None, folder: str) -> str:
    """Start to train, rank 1 with `override` and another torchvision, by what pip would have left
    there.
    """
    own = [override] if read_environment().rank == 1 else []
    if own and torchvision:
        package = Path(folder) / f"torchvision-{torchvision}.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torchvision\nVersion: {torchvision}\n"
        )
        sys.path.insert(0, folder)
    try:
        run(compose(*TINY, f"output_dir={folder}", "name=run", *own))
    except ConfigError as error:
        shutdown()
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("override", "torchvision", "message"),
    [
        (
            "seed=3",
            None,
            "rank 1 was started with other config values than rank 0 (seed: 0 → 3): use the same ",
        ),
        ("seed=0", "0.14.1", "rank 1 was started with other versions than rank 0 (torchvision: 0."),
    ],
    ids=["config", "versions"],
)
def test_ranks_that_differ_are_refused_alike(
    override: str, torchvision: str | None, message: str, tmp_path: Path
) -> None:
    first, second = on_ranks(2, refusal, override, torchvision, str(tmp_path))
    assert first == second
    assert first.startswith(message)
    assert not (tmp_path / "run").exists()


def settled_precision(folder: str) -> str:
    """Train where rank 0 multiplies bf16 and rank 1, as if it were on an older processor,
    does not.
    """
    is_first = read_environment().rank == 0
    start.has_fast_bf16 = lambda _device: is_first
    run(compose(*TINY, "max_steps=2", "precision=auto", f"output_dir={folder}", "name=run"))
    return (Path(folder) / "run/train.log").read_text()


def test_auto_is_what_all_ranks_can(tmp_path: Path) -> None:
    text, _ = on_ranks(2, settled_precision, str(tmp_path))
    assert "(gloo), fp32," in text
