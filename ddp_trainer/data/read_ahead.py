"""Threads that read in advance."""

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
    """Yield ``begin(pool, item)`` for each item in order, called for `ahead` items in advance.

    begin: submits work to the pool of `num_threads` threads, and returns the futures of this work.
    All threads have ended when the generator is closed or exhausted.
    """
    # One thread an operation: torch's default, a thread for each core, would compete with the other
    # threads of the pool and with the training.
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
