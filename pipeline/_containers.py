"""Walk the containers that hold a batch: map their tensors, keep their kind. Pure: nothing is sent anywhere.

What is a leaf, what a container, what is passed through:
- Leaf: a torch tensor, and whatever has a ``.to`` method of its own (a graph, a packed sequence, a tokenizer's
  encoding): it knows best how to move itself.
- Container: a mapping, a named tuple, a sequence, a dataclass. It is always rebuilt, also when no leaf is inside, so
  that a sampler may reuse its list while the copy waits for its turn.
- Anything else (NumPy arrays, strings, bytes, numbers, ranges, sets, None, objects) is passed through, not copied.
"""

from __future__ import annotations

import array
import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch

# Sequences of numbers or characters: nothing in them can move.
_WHOLE = (str, bytes, bytearray, memoryview, range, array.array, np.ndarray)
# A list of only these holds no leaf and no container. Lists of row numbers are long, so they get no call an element.
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), np.int64, np.int32, np.float64, np.float32, np.bool_})


def map_leaves(obj: Any, fn: Callable[[Any], Any]) -> Any:
    """``obj`` rebuilt with ``fn(leaf)`` in the place of each leaf; see the module for what is a leaf.

    The kind of each container is kept: dict, list and tuple subclasses with their attributes, named tuples, default
    and ordered dicts, ``UserDict``, deques with their ``maxlen``; dataclasses field by field, without calling
    ``__init__``, so frozen ones and ``init=False`` fields too. A mapping whose class takes no mapping becomes a dict,
    a sequence whose class takes no iterable a list or tuple. Containers are new, everything else in them is shared.

    Raises:
        ValueError: a container holds itself. Whatever ``fn`` raises is passed on.
    """
    return _map(obj, fn, ())


def leaves(obj: Any) -> list[Any]:
    """The leaves of ``obj`` in the order in which ``map_leaves`` meets them; the same object as often as it occurs."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(obj, note)
    return found


def is_leaf(obj: Any) -> bool:
    """Whether ``fn`` of ``map_leaves`` is called with ``obj``."""
    # Asked of the class: a mapping that shows its keys as attributes may have a key "to".
    return isinstance(obj, torch.Tensor) or (
        not isinstance(obj, (type, np.ndarray)) and callable(getattr(type(obj), "to", None))
    )


def _map(obj: Any, fn: Callable[[Any], Any], inside: tuple[int, ...]) -> Any:
    """``map_leaves``; ``inside`` are the ids of the containers around ``obj``."""
    if is_leaf(obj):
        return fn(obj)
    if isinstance(obj, Mapping):
        rebuild: Callable[[Any, Callable[[Any], Any]], Any] = _map_mapping
    elif isinstance(obj, Sequence) and not isinstance(obj, _WHOLE):
        rebuild = _map_sequence
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        rebuild = _map_dataclass
    else:
        return obj
    if id(obj) in inside:
        raise ValueError(f"a batch item holds a {type(obj).__name__} that holds itself; containers must be trees")
    around = (*inside, id(obj))
    return rebuild(obj, lambda value: _map(value, fn, around))


def _map_mapping(obj: Mapping[Any, Any], child: Callable[[Any], Any]) -> Any:
    values = {key: child(value) for key, value in obj.items()}
    if type(obj) is dict:
        return values
    if isinstance(obj, dict) or (isinstance(obj, MutableMapping) and hasattr(type(obj), "__copy__")):
        clone = copy.copy(obj)  # keeps a default factory and attributes; a constructor would not
        for key, value in values.items():
            clone[key] = value
        return clone
    made = _construct(type(obj), values)
    return made if isinstance(made, Mapping) and dict(made.items()).keys() == values.keys() else values


def _map_sequence(obj: Sequence[Any], child: Callable[[Any], Any]) -> Any:
    kind = type(obj)
    if (kind is list or kind is tuple) and _ATOMS.issuperset(map(type, obj)):
        return obj[:]
    values = [child(value) for value in obj]
    if kind is list:
        return values
    if hasattr(kind, "_make") and isinstance(obj, tuple):
        return kind._make(values)
    if isinstance(obj, list) or (isinstance(obj, MutableSequence) and hasattr(kind, "__copy__")):
        clone = copy.copy(obj)  # keeps a deque's maxlen, and attributes
        for place, value in enumerate(values):
            clone[place] = value
        return clone
    made = tuple(values) if kind is tuple else _construct(kind, values)
    if isinstance(made, Sequence) and len(made) == len(values) and all(a is b for a, b in zip(made, values, strict=True)):
        return made
    return values if isinstance(obj, MutableSequence) else tuple(values)


def _construct(kind: type, contents: Any) -> Any:
    """``kind(contents)``, or None where the class takes something else; the caller then uses a plain container."""
    try:
        return kind(contents)
    except (TypeError, ValueError, AttributeError, LookupError):
        return None


def _map_dataclass(obj: Any, child: Callable[[Any], Any]) -> Any:
    state = object.__getstate__(obj)  # attributes, or (attributes, slots), or None: also what is no field
    parts = state if isinstance(state, tuple) else (state,)
    values = {name: value for part in parts for name, value in (part or {}).items()}
    clone = object.__new__(type(obj))
    for field in dataclasses.fields(obj):
        if field.name in values:
            values[field.name] = child(values[field.name])
    for name, value in values.items():
        object.__setattr__(clone, name, value)  # past the refusal of a frozen class
    return clone
