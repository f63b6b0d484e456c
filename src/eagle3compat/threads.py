"""Threads that compute with torch beside others that need the processor."""

from __future__ import annotations

import threading

_setting = threading.Lock()


def compute_alone() -> None:
    """Have torch use no other thread than this one for what this one does; for all others nothing changes.

    For threads that share the work among themselves, and for those of a driver: on a CPU its worker has every core, a
    thread on each, and a team of torch's in the driver, which spins for a while after each copy, holds these up. With
    vLLM 0.16.0 on two cores that took a quarter of the speed.
    """
    import torch

    with _setting:  # torch sets the number for this thread, and at once for all that are yet to be
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(threads,))
        restoring.start()
        restoring.join()
