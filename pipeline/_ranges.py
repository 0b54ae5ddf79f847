"""NVTX ranges around what a pipeline does, for Nsight Systems. Off unless the environment asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

VARIABLE = "ROWFERRY_NVTX"

Ranges = Callable[[str], AbstractContextManager[Any]]


def ranges_wanted() -> Ranges | None:
    """``range(name)`` for a ``with``, in the domain ``rowferry``; None unless ``ROWFERRY_NVTX`` is 1.

    A profile is taken from outside the program, so what it needs is switched on there too.

    Raises:
        ImportError: it is, and the package nvtx is not installed. ValueError: it is neither 0 nor 1.
    """
    wanted = os.environ.get(VARIABLE, "0")
    if wanted not in ("0", "1", ""):
        raise ValueError(f"{VARIABLE} is {wanted!r}; set it to 1 for NVTX ranges, or to 0")
    if wanted != "1":
        return None
    try:
        import nvtx
    except ImportError as error:
        raise ImportError(f"{VARIABLE}=1 needs the package nvtx; get it by: pip install 'rowferry[nvtx]'") from error
    return lambda name: nvtx.annotate(name, domain="rowferry")  # type: ignore[no-any-return, unused-ignore]
