"""A generator for which a pool of threads reads items in advance."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def read_ahead(
    begin: Callable[[ThreadPoolExecutor, T], R], items: Iterable[T], *, num_threads: int, ahead: int
) -> Generator[R]:
    """Yield ``begin(pool, item)`` for each item in order; `begin` is called `ahead` items earlier.

    begin: submits work to `pool`, which has `num_threads` threads, and returns its futures. When
    the generator is closed or exhausted, waiting work is cancelled and all threads have ended.
    """
    # torch uses one thread for each operation of a pool thread. Its default, one per core, would
    # compete with the other pool threads and with the training.
    pool = ThreadPoolExecutor(max(1, num_threads), "reader", torch.set_num_threads, (1,))
    begun = deque[R]()
    try:
        for item in items:
            begun.append(begin(pool, item))
            if len(begun) > ahead:
                yield begun.popleft()
        yield from begun
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
