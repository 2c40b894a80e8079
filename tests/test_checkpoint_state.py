"""The state of a checkpoint on its way to all ranks: equal on each, and in memory once."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from runs import assert_bitwise, in_process_group
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ddp_trainer.checkpoint.file import broadcast_state, read_state, write_file

MIB = 2**20
SIZE_MB = 256


def memory_mb(name: str) -> int:
    """Return the resident memory of this process now (RSS) or at its peak (HWM), in MiB."""
    kilobytes = re.findall(rf"Vm{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes[0]) // 1024


def state_of_many_types() -> dict[str, Any]:
    channels_last = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    return {
        "step": 3,
        "epoch": 1,
        "model": {"weight": channels_last, "count": torch.tensor(7), "empty": torch.zeros(0, 2)},
        "optimizer": {
            "state": {0: {"half": torch.randn(9).bfloat16(), "mask": torch.tensor([True, False])}}
        },
        "names": ["a", "ä\n"],
        "nothing": None,
        "pair": (1, 2.5),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }


def received(path: str) -> dict[str, Any]:
    with in_process_group() as world:
        state = broadcast_state(read_state(Path(path)) if world.is_main else {}, world)
        assert broadcast_state({}, world) == {}
        assert_bitwise(state, read_state(Path(path)))
        return {"tensors": sum(isinstance(leaf, Tensor) for leaf in tree_flatten(state)[0])}


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_receives_the_state_of_rank_0(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_file(tmp_path / "step-00000003.pt", state_of_many_types())
    assert on_ranks(ranks, received, str(tmp_path / "step-00000003.pt")) == [{"tensors": 6}] * ranks


def growth_mb(path: str) -> int:
    """Return by how much this rank's memory grows at most while it receives the state."""
    with in_process_group() as world:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = memory_mb("RSS")
        broadcast_state(read_state(Path(path)) if world.is_main else {}, world)
        return memory_mb("HWM") - before


def test_no_rank_holds_the_state_twice(tmp_path: Path) -> None:
    tensors = {f"layer{number}": torch.ones(SIZE_MB // 8 * MIB // 4) for number in range(8)}
    write_file(tmp_path / "step-00000001.pt", {"step": 1, "epoch": 0, "model": tensors})
    grown = on_ranks(2, growth_mb, str(tmp_path / "step-00000001.pt"))
    assert all(0.9 * SIZE_MB < mb < 1.5 * SIZE_MB for mb in grown), grown
