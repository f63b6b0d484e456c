"""Threads that compute alone, beside threads that go on as they were."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from eagle3compat.threads import compute_alone

POOL = 8


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_thread_of_a_pool_computes_alone_and_no_other_does(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    together = threading.Barrier(POOL)

    def count() -> int:
        together.wait(60)  # so that each thread of the pool counts once
        return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(POOL, initializer=compute_alone) as pool:
            assert [future.result() for future in [pool.submit(count) for _ in range(POOL)]] == [1] * POOL
        assert torch.get_num_threads() == threads
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == threads
    finally:
        torch.set_num_threads(before)
