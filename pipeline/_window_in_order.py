"""The arithmetic of a window that is laid out in the order asked for: there is next to none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from torch import Tensor

from ._window import Layout, Older, Sorted


@final
class InOrderPlan:
    """``Plan`` for tensors of the CPU, of epochs in which no row is twice: places are those asked for. Any thread.

    ``Sorted`` are the ids as they come. ``Layout.older`` stays as it is: no later window asks for these rows.

    Assumes:
    - Read-only: there are no ``batch_places`` and no ``inverse``.
    """

    def count(self, ids: Tensor, ends: Tensor, older: Sequence[Older], out: Sorted, counts: Tensor) -> None:
        """See ``Plan``."""
        del older
        np.copyto(out.ids.numpy(), ids.numpy())
        lines = counts.numpy()
        lines[:] = 0
        lines[0] = lines[-1] = ends.numpy()

    def arrange(self, sorted_: Sorted, ends: Tensor, older: Sequence[Older], sizes: Sequence[int], out: Layout) -> None:
        """See ``Plan``."""
        del ends, older, sizes
        np.copyto(out.rows.numpy(), sorted_.ids.numpy())
        out.places.numpy()[:] = np.arange(out.places.numel())
