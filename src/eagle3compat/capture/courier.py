"""Brings captured rows from the device to where they belong in host memory, without holding up the forward."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

log = logging.getLogger("eagle3compat")

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of rows on the device and their place on the host, of one shape and dtype."""


class Courier(Protocol):
    def adopt(self, data: torch.Tensor | None) -> None:
        """From now on places lie in this memory. Nothing may be under way."""

    def send(self, copies: Copies, done: Callable[[], None]) -> None:
        """Copy rows to their places, and call `done` when they are there: at once, or later in another thread."""

    def settle(self, keep: int = 0) -> None:
        """Wait until at most `keep` sends are under way. Raises what a send failed with."""

    def abandon(self) -> None:
        """Wait until nothing is under way; what sends failed with is of no interest any more."""


class Direct:
    """Copies at once, on the CPU and on accelerators of which nothing is known but that they can copy."""

    def adopt(self, data: torch.Tensor | None) -> None:
        return

    def send(self, copies: Copies, done: Callable[[], None]) -> None:
        for rows, place in copies:
            place.copy_(rows)
        done()

    def settle(self, keep: int = 0) -> None:
        return

    def abandon(self) -> None:
        return


class SideStream:
    """Copies on a stream of its own, on CUDA and ROCm, while the model goes on computing.

    Shared memory is registered with the driver, so that the device writes rows straight to their places. What is not
    registered is reached through pinned buffers of torch's, which come back to its cache after use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._registered: torch.Tensor | None = None
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._under_way = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        threading.Thread(target=self._confirm, name="eagle3compat-courier", daemon=True).start()

    def adopt(self, data: torch.Tensor | None) -> None:
        cudart = torch.cuda.cudart()
        if self._registered is not None:
            cudart.cudaHostUnregister(self._registered.data_ptr())
        self._registered = None
        if data is None:
            return
        code = int(cudart.cudaHostRegister(data.data_ptr(), data.nbytes, 0))
        if code == 0:
            self._registered = data
        else:
            self._clear_error()
            log.warning("eagle3compat: shared memory could not be registered (code %d); copies are staged.", code)

    def _clear_error(self) -> None:
        """CUDA keeps the code of a failed call, and torch raises it at the next launch of a kernel, whosever it is."""
        try:
            torch.zeros(1, device=self._device)
        except RuntimeError:
            return

    def _is_registered(self, place: torch.Tensor) -> bool:
        memory = self._registered
        return memory is not None and 0 <= place.data_ptr() - memory.data_ptr() < memory.nbytes

    def send(self, copies: Copies, done: Callable[[], None]) -> None:
        staged = []
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for rows, place in copies:
                if self._is_registered(place):
                    place.copy_(rows, non_blocking=True)
                else:
                    buffer = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
                    staged.append((buffer.copy_(rows, non_blocking=True), place))
                rows.record_stream(self._stream)  # its memory is not given to others before it is copied
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        with self._changed:
            self._under_way += 1
        self._sent.put((event, staged, done))

    def settle(self, keep: int = 0) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._under_way <= keep)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._under_way == 0)
            self._error = None

    def _confirm(self) -> None:
        torch.cuda.set_device(self._device)
        with torch.inference_mode():  # as the forward runs, within which places may have been made
            while True:
                self._confirm_next()

    def _confirm_next(self) -> None:
        event, staged, done = self._sent.get()
        try:
            event.synchronize()
            for buffer, place in staged:
                place.copy_(buffer)
            done()
        except Exception as error:  # noqa: BLE001  settle() raises it in the worker's own thread
            self._error = self._error or error
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()


def courier_for(device: torch.device) -> Courier:
    """The courier for rows on this device. ROCm builds of torch call their devices `cuda` too."""
    return SideStream(device) if device.type == "cuda" else Direct()
