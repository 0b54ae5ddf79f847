"""Walking containers: which kinds are kept, what is a leaf, what passes through."""

from __future__ import annotations

import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowferry.pipeline._containers import leaves, map_leaves

ONE = torch.tensor(1)


def plus(leaf: Any) -> Any:
    return leaf + 1


class Pair(NamedTuple):
    x: Any
    y: Any


class Edge(NamedTuple):
    """A field may be called "to"; that makes no leaf."""

    to: Any
    origin: Any


class Tagged(list[Any]):
    tag = ""


class ReadOnly(Mapping[str, Any]):
    """A mapping whose class takes something else than a mapping."""

    def __init__(self, *, hidden: dict[str, Any]) -> None:
        self._hidden = hidden

    def __getitem__(self, key: str) -> Any:
        return self._hidden[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hidden)

    def __len__(self) -> int:
        return len(self._hidden)


class Two(Sequence[Any]):
    """A sequence whose class takes no iterable."""

    def __init__(self, a: Any, b: Any) -> None:
        self.pair = (a, b)

    def __getitem__(self, place: Any) -> Any:
        return self.pair[place]

    def __len__(self) -> int:
        return 2


class Attributes(dict[str, Any]):
    """A dict that shows its entries as attributes, as many configuration classes do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Movable:
    def __init__(self, where: str) -> None:
        self.where = where

    def to(self, where: str) -> Movable:
        return Movable(where)


@dataclass
class Plain:
    x: Any
    note: str = "n"
    derived: Any = field(init=False)

    def __post_init__(self) -> None:
        self.derived = ONE


@dataclass(frozen=True)
class Frozen:
    x: Any
    derived: Any = field(init=False, default=0)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: int = 2


@dataclass(frozen=True)
class HandSlotted:
    __slots__ = ("x",)
    x: Any


def test_a_tensor_alone_is_a_leaf() -> None:
    assert map_leaves(ONE, plus) == 2
    assert leaves(ONE) == [ONE]


@pytest.mark.parametrize(
    "build",
    [
        lambda t: {"a": t, 3: [t, "s"]},
        lambda t: OrderedDict(b=t, a=t),
        lambda t: UserDict(a=t),
        lambda t: Attributes(a=t, to=t),
        lambda t: MappingProxyType({"a": t}),
        lambda t: ChainMap({"a": t}, {"b": t}),
        lambda t: [t, 1, None],
        lambda t: (t, (t,)),
        lambda t: Pair(t, [t]),
        lambda t: Edge(t, t),
        lambda t: UserList([t]),
        lambda t: Tagged([t, t]),
        lambda t: torch.return_types.max((t, t)),
    ],
)
def test_the_kind_of_every_container_is_kept(build: Callable[[Any], Any]) -> None:
    given_, result = build(ONE), map_leaves(build(ONE), plus)
    assert type(result).__qualname__ == type(given_).__qualname__
    assert result == build(torch.tensor(2))
    assert given_ == build(ONE)


def test_default_dicts_deques_and_subclasses_keep_what_their_constructor_would_lose() -> None:
    table = map_leaves(defaultdict(list, a=ONE), plus)
    assert table["a"] == 2
    assert table["new"] == []
    recent = map_leaves(deque([1, ONE], maxlen=2), plus)
    assert recent.maxlen == 2
    assert list(recent) == [1, 2]
    tagged = Tagged([ONE])
    tagged.tag = "kept"
    result = map_leaves(tagged, plus)
    assert result == [2]
    assert result.tag == "kept"
    assert map_leaves(Counter(a=2), plus) == Counter(a=2)


def test_a_class_that_cannot_be_built_becomes_a_plain_container() -> None:
    assert map_leaves(ReadOnly(hidden={"a": ONE}), plus) == {"a": 2}
    assert map_leaves(Two(ONE, 5), plus) == (2, 5)


def test_dataclasses_are_mapped_by_field_without_init() -> None:
    plain = Plain([ONE])
    plain.extra = "kept"  # type: ignore[attr-defined]
    result = map_leaves(plain, plus)
    assert (result.x, result.note, result.derived, result.extra) == ([2], "n", 2, "kept")
    assert plain.x == [ONE]
    frozen = Frozen(ONE)
    object.__setattr__(frozen, "derived", ONE)
    assert map_leaves(frozen, plus) == _frozen(2, 2)
    assert map_leaves(Slotted(ONE), plus) == Slotted(2)
    assert map_leaves(HandSlotted(ONE), plus).x == 2
    with pytest.raises(FrozenInstanceError):
        map_leaves(frozen, plus).x = 3


def _frozen(x: Any, derived: Any) -> Frozen:
    made = Frozen(x)
    object.__setattr__(made, "derived", derived)
    return made


def test_a_field_that_was_never_set_stays_unset() -> None:
    plain = Plain(ONE)
    del plain.derived
    assert not hasattr(map_leaves(plain, plus), "derived")


def test_objects_with_a_to_method_are_leaves() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    item = [Movable("cpu"), {"p": packed}]
    assert leaves(item) == [item[0], packed]
    moved = map_leaves([Movable("cpu")], lambda leaf: leaf.to("gpu"))
    assert moved[0].where == "gpu"


@pytest.mark.parametrize(
    "thing",
    [
        *(np.arange(3), np.float32(1), np.array([object()]), torch.float32, torch.device("cpu")),
        *("text", b"bytes", bytearray(b"b"), memoryview(b"m"), array.array("i", [1]), range(5)),
        *(3, 2.5, None, {1, 2}, object(), Movable, Plain),
    ],
    ids=lambda thing: getattr(thing, "__name__", type(thing).__name__),
)
def test_everything_else_passes_through_unchanged(thing: Any) -> None:
    assert map_leaves(thing, plus) is thing
    assert map_leaves([thing], plus)[0] is thing
    assert leaves({"a": (thing,)}) == []


def test_containers_are_copied_also_when_nothing_in_them_is_mapped() -> None:
    rows, nested = [1, 2, 3], {"a": [1]}
    result, deep = map_leaves(rows, plus), map_leaves(nested, plus)
    rows[0] = nested["a"][0] = 9
    assert result == [1, 2, 3]
    assert deep == {"a": [1]}


def test_a_container_that_holds_itself_is_an_error_that_says_so() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(ValueError, match="list that holds itself"):
        map_leaves(loop, plus)
    with pytest.raises(ValueError, match="holds itself"):
        leaves(loop)


def test_a_container_that_occurs_twice_is_no_loop() -> None:
    shared = [ONE]
    assert map_leaves([shared, shared], plus) == [[2], [2]]


def test_what_fn_raises_is_passed_on() -> None:
    def refuse(leaf: Any) -> Any:
        raise TypeError("not this one")

    with pytest.raises(TypeError, match="not this one"):
        map_leaves(MappingProxyType({"a": [Pair(ONE, 0)]}), refuse)


TREES = st.recursive(
    st.integers() | st.text(max_size=2) | st.none() | st.builds(torch.tensor, st.integers(0, 9)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner)
        | st.lists(inner, max_size=3).map(deque)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(tree=TREES)
def test_mapping_by_identity_gives_an_equal_tree_with_the_same_leaves(tree: Any) -> None:
    same = map_leaves(tree, lambda leaf: leaf)
    assert same == tree
    assert type(same) is type(tree)
    assert all(a is b for a, b in zip(leaves(same), leaves(tree), strict=True))
    assert [int(leaf) for leaf in leaves(map_leaves(tree, plus))] == [int(leaf) + 1 for leaf in leaves(tree)]
