"""Every test ends without a thread of ours. A test that hangs is killed by pytest-timeout, which prints all stacks."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

# The contract suite and its oracle live in the package; their asserts should explain themselves as a test's do.
pytest.register_assert_rewrite("rowferry.stores.testing._suite", "rowferry.stores.testing._suite_reading")

JOIN_SECONDS = 5.0


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rowferry-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Threads that were told to end get a moment to do so; one that stays fails the test that left it."""
    yield
    if our_threads():
        gc.collect()  # a failed test's traceback may hold an iterator
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in our_threads():
        thread.join(max(deadline - time.monotonic(), 0.0))
    assert [thread.name for thread in our_threads()] == []
