"""The straggler: the right rank and phase soon, and no false alarm."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import on_ranks
from runs import TINY, compose

from ddp_trainer.config.schema import Config
from ddp_trainer.observers import ranks
from ddp_trainer.observers.ranks import Straggler, StragglerFinder, compare, median_of_others
from ddp_trainer.training_run import run

PHASES = ["data", "forward", "backward", "optimizer"]
BLOCK = 10


def blocks(
    shares: list[int],
    count: int,
    *,
    slow: int | None = None,
    phase: str = "backward",
    factor: float = 1.2,
    noise: float = 0.03,
    hiccup: float = 0.1,
    step_seconds: float = 0.06,
    seed: int = 0,
    waits: bool = False,
) -> list[torch.Tensor]:
    """Return the own times of blocks of steps, with some noise in all and long pauses in a few of
    them.

    waits: the slow rank is off its processor for what it loses, else it computes for longer.
    """
    chance = random.Random(seed)
    waiting = random.Random(seed)
    typical = torch.tensor([0.02, 0.33, 0.6, 0.05], dtype=torch.float64) * step_seconds * BLOCK
    made = []
    for _ in range(count):
        rows = []
        for rank, share in enumerate(shares):
            row = typical * share / max(shares)
            row = row * torch.tensor([chance.gauss(1, noise) for _ in PHASES], dtype=torch.float64)
            if chance.random() < hiccup / len(shares):
                row[chance.randrange(len(PHASES))] += (
                    chance.uniform(0.05, 0.5) * step_seconds * BLOCK
                )
            off = (
                0.01
                * typical
                * torch.tensor([waiting.random() for _ in PHASES], dtype=torch.float64)
            )
            if rank == slow:
                lost = (factor - 1) * typical.sum() * share / max(shares)
                row[PHASES.index(phase)] += lost
                off[PHASES.index(phase)] += lost * waits
            rows.append(torch.cat([row, off]))
        made.append(torch.stack(rows))
    return made


def found_after(
    finder: StragglerFinder, times: list[torch.Tensor], begin: int = 0
) -> list[Straggler | None]:
    """Return what is found after each block."""
    found = []
    for number, block in enumerate(times):
        finder.add(block, begin=begin + number * BLOCK)
        found.append(finder.found)
    return found


@pytest.mark.parametrize(
    "shares", [[8, 8], [8, 8, 8], [8, 8, 8, 8], [65, 64, 64], [64, 64, 64, 63]]
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_is_named_within_fifty_steps(shares: list[int], phase: str, seed: int) -> None:
    finder = StragglerFinder(PHASES, shares)
    slow = seed % len(shares)
    assert not any(found_after(finder, blocks(shares, 30, seed=seed, hiccup=0)))
    found = found_after(
        finder, blocks(shares, 5, slow=slow, phase=phase, seed=seed, hiccup=0), begin=300
    )
    assert found[-1] is not None
    assert (found[-1].rank, found[-1].phase) == (slow, phase)
    assert found[-1].slowdown == pytest.approx(0.2, abs=0.06)
    assert 270 <= found[-1].since <= 310


@pytest.mark.parametrize("shares", [[8, 8], [2, 1], [3, 3, 2], [1, 1, 1, 1], [100, 99, 99, 99]])
def test_quiet_ranks_with_pauses_now_and_then_are_never_named(shares: list[int]) -> None:
    for seed in range(5):
        assert not any(found_after(StragglerFinder(PHASES, shares), blocks(shares, 100, seed=seed)))


def test_a_rank_with_a_larger_share_is_named_when_it_is_slow_by_the_image_too() -> None:
    finder = StragglerFinder(PHASES, [3, 2])
    found = found_after(
        finder, [*blocks([3, 2], 60, hiccup=0), *blocks([3, 2], 10, slow=0, factor=1.3, hiccup=0)]
    )
    assert found[-1] is not None
    assert found[-1].rank == 0


def test_a_rank_that_recovers_is_cleared_and_another_phase_is_named_only_if_it_costs_more() -> None:
    finder = StragglerFinder(PHASES, [8, 8, 8])
    shares = [8, 8, 8]
    assert not any(found_after(finder, blocks(shares, 30, hiccup=0)))
    slow = [
        *blocks(shares, 5, slow=1, phase="data", hiccup=0),
        *blocks(shares, 10, slow=1, phase="backward", hiccup=0),
    ]
    found = [straggler for straggler in found_after(finder, slow) if straggler]
    assert {straggler.rank for straggler in found} == {1}
    phases = [straggler.phase for straggler in found]
    assert (phases[0], phases[-1]) == ("data", "backward")
    assert sum(before != after for before, after in pairwise(phases)) == 1
    assert found_after(finder, blocks(shares, 5, hiccup=0))[-1] is None


def test_short_blocks_are_put_together() -> None:
    finder = StragglerFinder(PHASES, [8, 8])
    short = blocks([8, 8], 1000, slow=0, step_seconds=0.001)  # 10 ms each
    assert not any(found_after(finder, short))
    assert found_after(finder, blocks([8, 8], 1000, slow=0, step_seconds=0.001))[-1] is not None


def test_the_median_is_that_of_the_other_ranks() -> None:
    values = torch.rand(5, 3, dtype=torch.float64)
    for number in range(2, 6):
        some = values[:number]
        others = [torch.cat([some[:rank], some[rank + 1 :]]).numpy() for rank in range(number)]
        assert torch.equal(
            median_of_others(some),
            torch.stack([torch.tensor(np.median(o, axis=0)) for o in others]),
        )


def test_the_slowdown_is_that_of_the_whole_step() -> None:
    seconds = torch.tensor(
        [[1.0, 3.0, 0.0, 0.0], [1.0, 4.0, 0.0, 0.5], [1.0, 3.0, 0.0, 0.0]], dtype=torch.float64
    )
    slowdown = compare(seconds, torch.ones(3, dtype=torch.float64))
    assert slowdown[:, -1].tolist() == pytest.approx([-1 / 9, 0.25, -1 / 9])
    assert slowdown[1].tolist() == [0.0, 0.25, 0.0, 0.125, 0.25]


def test_a_rank_that_was_slow_from_the_start_is_named_when_the_noise_is_known() -> None:
    found = found_after(StragglerFinder(PHASES, [8, 8]), blocks([8, 8], 40, slow=1, hiccup=0))
    first = next(number for number, straggler in enumerate(found) if straggler)
    assert 20 <= first <= 30


def test_a_machine_that_is_noisy_takes_longer_and_has_no_false_alarm() -> None:
    finder = StragglerFinder(PHASES, [8, 8])
    noisy = blocks([8, 8], 400, noise=0.15, seed=3)
    assert not any(found_after(finder, noisy))
    found = found_after(finder, blocks([8, 8], 60, noise=0.15, slow=1, seed=4))
    assert found[-1] is not None
    assert found[-1].rank == 1


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_waits_is_named_soon_where_computing_is_noisy(phase: str) -> None:
    for seed in range(5):
        finder = StragglerFinder(PHASES, [8, 8])
        assert not any(found_after(finder, blocks([8, 8], 60, noise=0.1, seed=seed)))
        times = blocks(
            [8, 8],
            5,
            noise=0.1,
            slow=seed % 2,
            phase=phase,
            factor=1.3,
            waits=True,
            hiccup=0,
            seed=seed,
        )
        found = found_after(finder, times)
        assert found[-1] is not None
        assert (found[-1].rank, found[-1].phase) == (seed % 2, phase)


def test_of_a_rank_that_is_slow_in_all_phases_the_longest_is_named() -> None:
    for seed in range(5):
        finder = StragglerFinder(PHASES, [8, 8])
        assert not any(found_after(finder, blocks([8, 8], 30, hiccup=0, noise=0.01, seed=seed)))
        # forward loses 13 % of a step, backward 9 %
        slowed = torch.tensor([1.2, 1.4, 1.15, 1.2] * 2)
        times = [
            block * torch.stack([slowed, torch.ones(8)])
            for block in blocks([8, 8], 5, hiccup=0, noise=0.01, seed=seed)
        ]
        found = found_after(finder, times)[-1]
        assert found is not None
        assert (found.rank, found.phase) == (0, "backward")


def shares_in_a_run(config: Config) -> list[int]:
    """Return the shares of a batch that the finder of rank 0 gets; none on other ranks."""
    found: list[int] = []

    def build(phases: list[str], shares: list[int]) -> StragglerFinder:
        found.extend(shares)
        return StragglerFinder(phases, shares)

    ranks.StragglerFinder = build  # type: ignore[assignment,misc]
    run(config)
    return found


@pytest.mark.parametrize(("words", "shares"), [((), [5, 4, 4]), (("shards=4",), [3, 3, 7])])
def test_the_shares_of_ranks_are_those_of_their_samples(
    words: tuple[str, ...], shares: list[int], tmp_path: Path
) -> None:
    config = compose(*TINY, "global_batch_size=13", "max_steps=1", f"output_dir={tmp_path}", *words)
    assert on_ranks(3, shares_in_a_run, config) == [shares, [], []]
