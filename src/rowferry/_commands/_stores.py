"""Open what the user named on the command line; check what can be checked before anything is read."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from rowferry.stores import Store, open_store
from rowferry.stores._url import is_url, parse_url

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A .npy or .safetensors file, a .zarr directory or .zip, or a URL.")
]
ArrayOption = Annotated[
    str | None, typer.Option("--array", metavar="NAME", help="The array inside a zarr group, or the tensor in a .safetensors.")
]
StoredOption = Annotated[
    str | None,
    typer.Option("--stored-dtype", metavar="DTYPE", help="What the bytes are, where the file cannot say it: bfloat16 in .npy."),
]


def dtype_named(name: str | None) -> torch.dtype | None:
    """The torch dtype called ``name`` (``float16``, ``bfloat16``, ...); None stays None.

    Raises:
        ValueError: torch has no dtype of that name.
    """
    if name is None:
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is not one of torch's; use for example float16, bfloat16, float32, int64 or uint8")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def shown(path: str) -> str:
    """``path`` as it may be printed: of a URL, without its query, which may be a signature."""
    return parse_url(path).name if is_url(path) else path


def open_named(path: str, array: str | None, stored: str | None) -> Store:
    """The store at ``path``, read-only."""
    return open_store(path, "r", array=array, dtype=dtype_named(stored))
