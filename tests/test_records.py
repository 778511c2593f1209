"""Records come from handwritten or damaged files, so every wrong form must be refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from redraft.errors import UsageError
from redraft.records import PositiveInt, from_plain, to_plain


@dataclass(frozen=True)
class Part:
    size: PositiveInt = 1
    shape: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Whole:
    name: str
    kind: Literal["a", "b"] = "a"
    part: Part = Part()
    parts: Mapping[str, Part] = field(default_factory=dict)
    rate: float = 0.5
    exact: bool = False
    count: PositiveInt | None = None
    steps: Annotated[int, 0, "a number of steps"] = 0
    more: Any = None

    def __post_init__(self) -> None:
        if self.name == "none":
            raise UsageError("no name", "give one")


WHOLE = Whole("x", "b", Part(2, ("B", 3)), {"y": Part(4)}, 1.0, True, 5, 6, {"z": [7]})


def test_a_record_survives_the_round_trip() -> None:
    plain = to_plain(WHOLE)
    assert plain["part"] == {"size": 2, "shape": ["B", 3]}
    assert from_plain(Whole, plain, "it") == WHOLE
    assert from_plain(Whole, {"name": "x"}, "it") == Whole("x")


def test_a_whole_number_is_a_number_too() -> None:
    assert type(from_plain(Whole, {"name": "x", "rate": 2}, "it").rate) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown key colour; known keys are count, exact, kind, more, name, part, parts, rate, steps"),
        ({"part": {"depth": 1}}, "unknown key part.depth; known keys are shape, size"),
        ({"parts": {"y": {"depth": 1}}}, "unknown key parts.y.depth; known keys are shape, size"),
        ({"name": 3}, "name must be text, not 3"),
        ({"name": "none"}, "no name; give one"),
        ({"kind": "c"}, "kind must be one of a, b, not 'c'"),
        ({"kind": []}, "kind must be one of a, b, not []"),
        ({"part": 3}, "part must be a table, not 3"),
        ({"parts": []}, "parts must be a table, not []"),
        ({"part": {"size": 0}}, "part.size must be a positive number, not 0"),
        ({"part": {"size": True}}, "part.size must be a positive number, not True"),
        ({"part": {"shape": "B"}}, "part.shape must be a list, not 'B'"),
        ({"part": {"shape": [1, None]}}, "part.shape[1] must be text, not None"),
        ({"rate": "1"}, "rate must be a number, not '1'"),
        ({"rate": True}, "rate must be a number, not True"),
        ({"exact": 1}, "exact must be true or false, not 1"),
        ({"count": 1.5}, "count must be a positive number, not 1.5"),
        ({"steps": -1}, "steps must be a number of steps, not -1"),
    ],
)
def test_a_value_that_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        from_plain(Whole, {**to_plain(WHOLE), **change}, "it")
    assert str(error.value) == f"it: {message}"


def test_a_missing_key_is_named() -> None:
    with pytest.raises(UsageError, match="it: missing key name; known keys are count"):
        from_plain(Whole, {}, "it")


def test_a_record_without_keys_says_so() -> None:
    @dataclass(frozen=True)
    class Nothing:
        pass

    with pytest.raises(UsageError, match="it: unknown key a; leave it out: no key is known here"):
        from_plain(Nothing, {"a": 1}, "it")


def test_a_record_that_is_no_table() -> None:
    with pytest.raises(UsageError, match="it: must be a table, not 3"):
        from_plain(Whole, 3, "it")
