"""The comparison with peers reads what runs write."""

import importlib.util
import sys
from pathlib import Path

import pytest

DATA = Path("/usr/share/datasets/fashion-mnist")
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "compare.py"


@pytest.mark.skipif(not DATA.is_dir(), reason="needs Debian's dataset-fashion-mnist")
@pytest.mark.parametrize("name", ["ddp_trainer", "plain DDP"])
def test_a_trainer_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specification = importlib.util.spec_from_file_location("compare", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    compare = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "compare", compare)
    specification.loader.exec_module(compare)
    job = compare.Job(model="lenet", ranks=1, global_batch_size=64, steps=6, window=2, precision="fp32", device="cpu",
                      data=DATA)  # fmt: skip
    measured = compare.run_trainer(job, name, workers=0)
    assert measured["images_per_second"] > 0
    assert measured["first_step_seconds"] > 0
