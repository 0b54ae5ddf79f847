"""Shared by the tests of stores."""

from __future__ import annotations

import pytest

# The suite and its oracle live in the package; their asserts should explain themselves as a test's do.
pytest.register_assert_rewrite("rowferry.stores.testing._suite", "rowferry.stores.testing._suite_reading")
