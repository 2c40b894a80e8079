"""Law 2: global batches are slices of one order, whatever the number of ranks; each rank takes
every W-th.
"""

import torch
from hypothesis import given, settings, strategies as st
from hypothesis.strategies import DrawFn
from torch.utils.data import DataLoader, DistributedSampler

from ddp_trainer.data.sampler import GlobalBatchSampler

Sizes = tuple[int, int, int]


@st.composite
def sizes(draw: DrawFn) -> Sizes:
    """Draw (number of samples, global batch size, world size) that go together."""
    world_size = draw(st.integers(1, 9))
    global_batch_size = draw(st.integers(world_size, 40))
    return draw(st.integers(global_batch_size, 200)), global_batch_size, world_size


def samplers(sizes: Sizes, *, seed: int = 0) -> list[GlobalBatchSampler]:
    """Return the sampler of each rank."""
    length, size, world_size = sizes
    return [
        GlobalBatchSampler(
            length, global_batch_size=size, world_size=world_size, rank=rank, seed=seed
        )
        for rank in range(world_size)
    ]


def batches(sampler: GlobalBatchSampler) -> list[list[int]]:
    """Return the batches that a torch DataLoader makes of what `sampler` yields."""
    loader = DataLoader(range(sampler.length), batch_size=sampler.local_batch_size, sampler=sampler)  # type: ignore[arg-type]
    return [batch.tolist() for batch in loader]


@settings(max_examples=50, deadline=None)
@given(sizes(), st.integers(0, 3), st.integers(0, 5))
def test_each_rank_gets_its_closed_form_share_of_every_global_batch(
    sizes: Sizes, seed: int, epoch: int
) -> None:
    length, size, world_size = sizes
    for rank, sampler in enumerate(samplers(sizes, seed=seed)):
        sampler.set_epoch(epoch)
        order = sampler.order().tolist()
        shares = [order[k * size : (k + 1) * size][rank::world_size] for k in range(length // size)]
        assert batches(sampler) == shares
        assert isinstance(sampler, DistributedSampler)
        assert list(sampler) == [sample for share in shares for sample in share]
        assert (
            len(sampler) == len(list(sampler)) == sampler.steps_per_epoch * sampler.local_batch_size
        )


@settings(max_examples=50, deadline=None)
@given(sizes(), st.data())
def test_from_the_cursor_on_the_same_batches_come(sizes: Sizes, data: st.DataObject) -> None:
    sampler = samplers(sizes)[-1]
    sampler.set_epoch(2)
    whole = batches(sampler)
    step = data.draw(st.integers(0, sampler.steps_per_epoch))
    sampler.set_epoch(2, step)
    assert batches(sampler) == whole[step:]
    assert len(sampler) == sum(map(len, whole[step:]))


@settings(max_examples=50, deadline=None)
@given(sizes(), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_the_order_is_a_permutation_that_seed_and_epoch_alone_decide(
    sizes: Sizes, seed: int, epoch: int
) -> None:
    orders = []
    for sampler in (*samplers(sizes, seed=seed), *samplers((sizes[0], sizes[0], 1), seed=seed)):
        sampler.set_epoch(epoch + 1)
        sampler.order()  # what came before leaves no trace
        sampler.set_epoch(epoch)
        orders.append(sampler.order())
    assert sorted(orders[0].tolist()) == list(range(sizes[0]))
    assert all(torch.equal(order, orders[0]) for order in orders)


def test_another_seed_or_epoch_is_another_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = samplers((100, 10, 2), seed=seed)[0]
        sampler.set_epoch(epoch)
        return sampler.order().tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 1) != order(1, 0)


def test_every_place_in_the_order_is_as_likely_for_every_sample() -> None:
    sampler = samplers((5, 5, 1))[0]
    counts = torch.zeros(5, 5)
    for epoch in range(2000):
        sampler.set_epoch(epoch)
        counts[torch.arange(5), sampler.order()] += 1
    assert (counts / 2000 - 0.2).abs().max() < 0.04  # 4.5 standard deviations
