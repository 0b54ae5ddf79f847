"""The state of a pipeline as JSON holds it, in a commit record. Nothing in it is unpickled or executed."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_KIND = "__rowferry__"  # the key of what JSON has no type for


def encode_state(state: Any, place: str = "state") -> Any:
    """``state`` as dicts, lists, strings, numbers, bools and None: what JSON gives back as it was.

    Args:
        state: of these, and of tuples, bytes, tensors and arrays of numbers.
        place: what errors call it.

    Raises:
        TypeError: something else is in it; the error says where.
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, list):
        return [encode_state(each, f"{place}[{number}]") for number, each in enumerate(state)]
    if isinstance(state, tuple):
        return {_KIND: "tuple", "items": [encode_state(each, f"{place}[{number}]") for number, each in enumerate(state)]}
    if isinstance(state, dict):
        items = [
            [encode_state(key, f"a key of {place}"), encode_state(value, f"{place}[{key!r}]")] for key, value in state.items()
        ]
        if all(isinstance(key, str) and key != _KIND for key in state):
            return dict(items)
        return {_KIND: "dict", "items": items}
    if isinstance(state, bytes):
        return {_KIND: "bytes", "data": base64.b64encode(state).decode()}
    if isinstance(state, torch.Tensor):
        flat = state.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        dtype = str(state.dtype).removeprefix("torch.")
        return {_KIND: "tensor", "dtype": dtype, "shape": list(state.shape), "data": base64.b64encode(flat.tobytes()).decode()}
    if isinstance(state, np.ndarray | np.generic) and state.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(state).tobytes()).decode()
        return {_KIND: "array", "dtype": state.dtype.str, "shape": list(state.shape), "data": data}
    raise TypeError(
        f"{place} is a {type(state).__name__}, which a commit record cannot hold: use numbers, strings, bytes, tensors, arrays "
        "and lists, tuples and dicts of them"
    )


def decode_state(state: Any) -> Any:
    """What ``encode_state`` was given."""
    if isinstance(state, list):
        return [decode_state(each) for each in state]
    if not isinstance(state, dict):
        return state
    kind = state.get(_KIND)
    if kind is None:
        return {key: decode_state(value) for key, value in state.items()}
    if kind == "tuple":
        return tuple(decode_state(each) for each in state["items"])
    if kind == "dict":
        return {decode_state(key): decode_state(value) for key, value in state["items"]}
    raw = base64.b64decode(state["data"])
    if kind == "bytes":
        return raw
    if kind == "array":
        return np.frombuffer(raw, np.dtype(state["dtype"])).reshape(state["shape"]).copy()
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(_DTYPES[state["dtype"]]).view(state["shape"])
