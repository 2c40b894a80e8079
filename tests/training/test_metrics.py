"""MetricSums, the digest of samples, and the peak memory."""

import numpy as np
import pytest
import torch

from ddp_trainer.observers.ranks import peak_memory_mb
from ddp_trainer.sync.fingerprint import rank_outside_majority
from ddp_trainer.training.metrics import MetricSums, SampleDigest

CPU = torch.device("cpu")


def test_sums_are_numpys() -> None:
    random = np.random.default_rng(0)
    sums = MetricSums(CPU)
    logits = []
    labels = []
    losses = []
    for size in (1, 5, 64):
        logits.append(random.normal(size=(size, 10)))
        labels.append(random.integers(10, size=size))
        losses.append(random.normal())
        sums.add(
            torch.tensor(losses[-1]), torch.from_numpy(logits[-1]), torch.from_numpy(labels[-1])
        )
    correct = (np.concatenate(logits).argmax(1) == np.concatenate(labels)).sum()
    np.testing.assert_allclose(sums.vector.numpy(), [np.sum(losses), correct, 70, 0])


def test_sums_count_beyond_what_float32_holds() -> None:
    sums = MetricSums(CPU)
    sums.vector[1:] = 2**24
    sums.add(torch.tensor(0.0), torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    sums.add_skipped(torch.tensor(True))
    assert sums.vector[1:].tolist() == [2**24 + 1] * 3


def digest(*steps: list[int], first: int = 0) -> list[int]:
    """Return the digest of a rank that used the samples `steps[k]` at step `first` + k."""
    digest_of_rank = SampleDigest(CPU)
    for step, ids in enumerate(steps, first):
        digest_of_rank.add(torch.tensor(ids, dtype=torch.int64), step=step)
    return digest_of_rank.vector.tolist()


def test_the_digest_tells_which_samples_were_used_at_which_step() -> None:
    assert digest([1, 2], [3, 4]) == digest([2, 1], [4, 3])  # in any order within a batch
    variants = [
        digest([1, 2], [3, 4]),
        digest([1, 3], [2, 4]),  # two swapped between batches
        digest([3, 4], [1, 2]),  # batches in another order
        digest([1, 2], [3, 5]),  # another sample
        digest([1, 2], [3, 3]),  # one twice, one not at all
        digest([1, 2]),  # a step left out
        digest([1, 2], [3, 4], first=1),  # a step later
        digest([0, 3], [3, 4]),  # an equal sum of ids
    ]
    assert len({SampleDigest.text(hashes) for hashes, _ in variants}) == len(variants)


def test_a_digest_goes_on_after_it_was_read() -> None:
    whole = SampleDigest(CPU)
    parts = SampleDigest(CPU)
    for step in range(4):
        whole.add(torch.tensor([step, 9]), step=step)
        parts.add(torch.tensor([step, 9]), step=step)
        assert parts.vector[1] == 2 * (step + 1)
    assert parts.vector.equal(whole.vector)


def test_digests_of_ranks_add_up_to_that_of_one() -> None:
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    batches = order.split(256)[:20]
    ranks = [digest(*(batch[rank::3].tolist() for batch in batches)) for rank in range(3)]
    total = torch.tensor(ranks).sum(0)  # wraps around
    assert total.tolist() == digest(*(batch.tolist() for batch in batches))


def splitmix(sample: int, step: int) -> int:
    """Hash as SampleDigest does, with Python's unbounded integers wrapped by hand."""

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    mixed = signed(signed(sample + step * 0x1000003) * -0x61C8864680B583EB)
    mixed = signed((mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47)
    return mixed ^ (mixed >> 32)


@pytest.mark.parametrize("step", [0, 1, 233, 10**9])
def test_the_digest_wraps_around_as_two_to_the_64(step: int) -> None:
    ids = [0, 1, 59_999, 2**40]
    digest_of_rank = SampleDigest(CPU)
    for _ in range(9):  # enough for the sum itself to wrap
        digest_of_rank.add(torch.tensor(ids), step=step)
        assert digest_of_rank.vector[1] % len(ids) == 0  # read, so that a step may be added again
    expected = 9 * sum(splitmix(sample, step) for sample in ids)
    assert int(digest_of_rank.vector[0]) % 2**64 == expected % 2**64
    assert SampleDigest.text(int(digest_of_rank.vector[0])) == f"{expected % 2**64:016x}"


def test_peak_memory_is_in_mebibytes() -> None:
    assert 50 < peak_memory_mb(CPU) < 100_000  # torch alone takes more than 50


@pytest.mark.parametrize(
    ("values", "rank"),
    [
        ([7, 7, 7], None),
        ([7, 7, 9], 2),
        ([9, 7, 7], 0),
        ([7, 9], None),
        ([7, 7, 9, 9], None),
        ([7, 8, 9], None),
    ],
)
def test_a_rank_is_named_only_by_more_than_half_of_the_ranks(
    values: list[int], rank: int | None
) -> None:
    assert rank_outside_majority(values) == rank
