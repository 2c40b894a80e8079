"""A collective of torch.distributed that code of a user calls on some ranks only: it is named."""

import re
from pathlib import Path

import pytest
from conftest import IS_FULL
from processes import launch, plugins, succeed
from runs import TINY

TESTS = Path(__file__).parents[1]
DATA = ("data=lonely", "model=lenet", "global_batch_size=12", "epochs=2")
PLACES = {
    "scalars": ("logger=lonely",),
    "__getitem__ in a thread": (*DATA, "data.num_workers=2"),
    "__getitem__": (*DATA, "data.num_workers=0"),
    "loss": ("loss=lonely",),
    "metric": ("metric=[lonely]",),
    "on_start": ("observer=[lonely]", "observer.lonely.event=on_start"),
    "on_step": ("observer=[lonely]", "observer.lonely.event=on_step"),
    "on_log": ("observer=[lonely]", "observer.lonely.event=on_log"),
    "on_evaluation": ("observer=[lonely]", "observer.lonely.event=on_evaluation"),
    "on_save": ("observer=[lonely]", "observer.lonely.event=on_save"),
    "rank_values": ("observer=[lonely]", "observer.lonely.event=rank_values"),
}
CASES = [(place, "all_reduce", 0) for place in PLACES]
IN_FULL = [(place, "barrier", 1) for place in PLACES if not place.startswith(("scalars", "metric"))]
IN_FULL += [
    ("on_step", name, 0)
    for name in (
        "broadcast",
        "all_gather",
        "all_gather_object",
        "reduce",
        "broadcast_object_list",
        "recv",
    )
]


@pytest.mark.chaos
def test_a_logger_that_waits_in_its_own_thread_harms_no_training(tmp_path: Path) -> None:
    words = (*TINY, "logger=lonely", "logger.lonely.in_background=true", "log_every_steps=1")
    done = succeed(*words, ranks=2, cwd=tmp_path, **plugins("lonely_collectives", TESTS))
    assert "logger=lonely failed (RuntimeError: " in done.output


@pytest.mark.chaos
@pytest.mark.parametrize(("first", "second"), [("barrier", "all_reduce"), ("reduce", "barrier")])
def test_ranks_that_call_other_collectives_are_named(
    first: str, second: str, tmp_path: Path
) -> None:
    done = launch(
        *TINY,
        "timeout_seconds=10",
        "observer=[lonely]",
        ranks=2,
        cwd=tmp_path,
        LONELY_FUNCTION=first,
        LONELY_OTHER=second,
        **plugins("lonely_collectives", TESTS),
    )
    assert done.code == 1, done.output
    assert f" waits in {first}, called at " in done.output, done.output
    assert ", and rank 1 does not call it: all ranks must make the same calls" in done.output


@pytest.mark.chaos
@pytest.mark.fault("a collective that user code calls on one rank only")
@pytest.mark.parametrize(("place", "function", "rank"), CASES + IN_FULL * IS_FULL)
def test_a_collective_of_one_rank_is_named(
    place: str, function: str, rank: int, tmp_path: Path
) -> None:
    words = (*TINY, "timeout_seconds=10", f"output_dir={tmp_path}", "name=run", "log_every_steps=1")
    chosen = PLACES[place]
    if chosen[:1] == DATA[:1]:
        words = ("timeout_seconds=10", f"output_dir={tmp_path}", "name=run", "precision=fp32")
    done = launch(
        *words,
        *chosen,
        ranks=2,
        cwd=tmp_path,
        LONELY_FUNCTION=function,
        LONELY_RANK=str(rank),
        **plugins("lonely_collectives", TESTS),
    )
    assert done.code == 1, done.output
    assert re.search(
        rf"rank {rank} on \S+ waits in {function}, called at \S+/lonely_collectives\.py:\d+ in"
        rf" <lambda>, and rank {1 - rank} does not call it: all ranks must make the same calls of"
        r" torch\.distributed",
        done.output,
    ), done.output
    assert "check the network" not in done.output
    assert "memory was full" not in done.output
    hang = (tmp_path / "run/hang.log").read_text()
    assert f" in {place.split()[0]}\n" in hang, hang


@pytest.mark.chaos
@pytest.mark.fault("another program that claims a failure in the store of the ranks")
@pytest.mark.parametrize("value", ["0", "1", "7", "x"])
def test_a_failure_that_no_rank_has_claimed_is_named(value: str, tmp_path: Path) -> None:
    words = (*TINY, "epochs=100000", "logger=[]", "observer=[forger]")
    done = launch(
        *words,
        f"observer.forger.value={value}",
        ranks=2,
        cwd=tmp_path,
        **plugins("lonely_collectives", TESTS),
    )
    assert done.code == 1
    assert "no rank has said so: another program has written to the MASTER_PORT" in done.output, (
        done.output
    )
