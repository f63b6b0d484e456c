"""What a command that starts a process does with signals."""

from __future__ import annotations

import signal

import pytest

from eagle3compat.steps import stoppable


def test_sigterm_is_an_interrupt_within_and_nothing_else_after() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stoppable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
