"""A part of every row: what can be asked for, and that every store and every chunking gives just that."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from rowferry.stores import ZarrStore, open_store
from rowferry.stores._select import selection_of

ROW = np.arange(5 * 6 * 4).reshape(5, 6, 4)


def parts(n: int) -> st.SearchStrategy[Any]:
    """An int or slice for a dimension of length ``n``."""
    bound = st.none() | st.integers(-n - 2, n + 2)
    return st.integers(-n, n - 1) | st.builds(slice, bound, bound, st.none() | st.integers(1, 3))


@st.composite
def selects(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    chosen = [draw(parts(n)) for n in shape]
    kept = draw(st.integers(0, len(shape)))
    if draw(st.booleans()):  # an ellipsis in the place of some
        return (*chosen[:kept], ..., *chosen[len(shape) - draw(st.integers(0, len(shape) - kept)) :])
    return tuple(chosen[:kept])


@given(select=selects(ROW.shape), chunk=st.tuples(*(st.integers(1, n + 1) for n in ROW.shape)))
def test_the_pieces_of_any_chunking_make_up_what_numpy_selects(select: Any, chunk: tuple[int, ...]) -> None:
    selection = selection_of(select, ROW.shape, "rows")
    assert selection.shape == ROW[select].shape
    assert np.array_equal(ROW[selection.key], ROW[select])
    out = np.full(selection.lengths, -1)
    seen = set()
    for piece in selection.pieces(chunk):
        assert piece.chunk not in seen
        seen.add(piece.chunk)
        start = tuple(k * n for k, n in zip(piece.chunk, chunk, strict=True))
        block = ROW[tuple(slice(a, a + n) for a, n in zip(start, chunk, strict=True))]
        out[piece.target] = block[piece.inside]
    assert np.array_equal(out.reshape(selection.shape), ROW[select])


@pytest.mark.parametrize(
    ("select", "error"),
    [
        ((0, 0, 0, 0), IndexError),
        (5, IndexError),
        ((0, -7), IndexError),
        ((..., 0, ...), IndexError),
        (slice(None, None, -1), ValueError),
        ([0, 1], TypeError),
        (True, TypeError),
        (1.0, TypeError),
    ],
)
def test_what_is_no_basic_index_of_a_row_is_refused(select: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="select"):
        selection_of(select, ROW.shape, "rows")


@pytest.fixture(params=["npy", "npy in Fortran order", "raw", "compressed"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    data = np.arange(20 * 6 * 4, dtype="f4").reshape(20, 6, 4)
    if request.param.startswith("npy"):
        np.save(tmp_path / "a.npy", np.asfortranarray(data) if "Fortran" in request.param else data)
        return tmp_path / "a.npy"
    compressors: Any = None if request.param == "raw" else "auto"
    zarr.create_array(tmp_path / "a.zarr", shape=data.shape, dtype="f4", chunks=(3, 2, 4), compressors=compressors)[...] = data
    return tmp_path / "a.zarr"


@pytest.mark.parametrize("select", [np.s_[2:4], np.s_[0], np.s_[:, 1:3], np.s_[..., -1], np.s_[1::2, 0], np.s_[2:2]], ids=str)
def test_a_store_opened_with_select_has_that_part_of_its_rows(path: Path, select: Any) -> None:
    data = np.arange(20 * 6 * 4, dtype="f4").reshape(20, 6, 4)
    with open_store(path, select=select) as store:
        wanted = np.stack([row[select] for row in data])
        assert store.shape == wanted.shape
        for rows in ([7, 0, 19, 7], range(4, 17), []):
            assert np.array_equal(store.gather(rows).numpy(), wanted[np.asarray(rows, int)])


def test_select_is_for_reading_only(path: Path) -> None:
    with pytest.raises(ValueError, match="select= is for reading"):
        open_store(path, "r+", select=0)


@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("decoder", ["zarr", "auto"])
def test_chunks_outside_of_the_part_are_not_needed(tmp_path: Path, compressors: Any, decoder: Any) -> None:
    data = np.arange(20 * 6, dtype="f4").reshape(20, 6)
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=data.shape, dtype="f4", chunks=(5, 2), compressors=compressors)[...] = data
    for place in range(4):
        (path / f"c/{place}/0").write_bytes(b"broken")
        (path / f"c/{place}/2").unlink()
    with ZarrStore(path, select=slice(2, 4), strict=True, decoder=decoder) as store:
        assert np.array_equal(store.gather([19, 0, 7]).numpy(), data[[19, 0, 7], 2:4])
    shutil.rmtree(path / "c/0")
    with (
        ZarrStore(path, select=slice(2, 4), strict=True, decoder=decoder) as store,
        pytest.raises(FileNotFoundError, match="c/0/1"),
    ):
        store.gather([7, 0])
