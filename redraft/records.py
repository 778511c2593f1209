"""Frozen dataclasses from plain values and back, driven by their annotations: recipes, manifests, options.

Unknown, missing and ill-typed keys are refused by name.
"""

from __future__ import annotations

import reprlib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from redraft.errors import UsageError

T = TypeVar("T")
PositiveInt = Annotated[int, 1, "a positive number"]
"""A number: its type, the least value, and the words of an error."""
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def to_plain(value: Any) -> Any:
    """Return the plain form of a record: dataclasses and mappings become dicts, tuples become lists."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], values: Any, where: str) -> T:
    """Return the record of the dataclass `cls` that `values` describe.

    Raises UsageError for unknown, missing and ill-typed keys, and for values that the dataclass refuses. Its message
    begins with `where`.
    """
    try:
        record: T = _decode(cls, values, "")
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from None
    return record


def _decode(hint: Any, value: Any, path: str) -> Any:
    """Return `value` as the type `hint`. path: keys that lead to it, joined by dots."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, least, words = args
        if _expect(kind, value, path, words) < least:
            raise _wrong(path, words, value)
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(args, value, path)
    if origin is Literal:
        if not any(type(value) is type(one) and value == one for one in args):
            words = [str(one).lower() if isinstance(one, bool) else str(one) for one in args]
            raise _wrong(path, f"one of {', '.join(words)}", value)
        return value
    if origin is tuple:
        items = _expect((list, tuple), value, path, "a list")
        return tuple(_decode(args[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    if origin in (Mapping, dict):
        return {key: _decode(args[1], item, _join(path, key)) for key, item in _table(value, path).items()}
    if is_dataclass(hint):
        return _decode_record(hint, _table(value, path), path)
    if hint is float and type(value) is int:
        return float(value)
    return value if hint is Any else _expect(hint, value, path, _WORDS[hint])


def _decode_record(cls: Any, values: Mapping[str, Any], path: str) -> Any:
    known = {f.name: f for f in fields(cls)}
    required = {f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING}
    for word, keys in (("unknown", set(values) - set(known)), ("missing", required - set(values))):
        if keys:
            listed = ", ".join(_join(path, key) for key in sorted(keys))
            known_keys = f"known keys are {', '.join(sorted(known))}" if known else "leave it out: no key is known here"
            raise UsageError(f"{word} key {listed}", known_keys)
    hints = get_type_hints(cls, include_extras=True)
    return cls(**{key: _decode(hints[key], item, _join(path, key)) for key, item in values.items()})


def _decode_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and types.NoneType in options:
        return None
    *others, last = (option for option in options if option is not types.NoneType)
    for option in others:
        try:
            return _decode(option, value, path)
        except UsageError:
            continue
    return _decode(last, value, path)


def _table(value: Any, path: str) -> Mapping[str, Any]:
    table: Mapping[str, Any] = _expect(Mapping, value, path, "a table")
    return table


def _expect(kind: Any, value: Any, path: str, words: str) -> Any:
    """Return `value` if it has the type. A bool is not an int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(path, words, value)
    return value


def _wrong(path: str, words: str, value: Any) -> UsageError:
    problem = f"must be {words}, not {reprlib.repr(value)}"
    return UsageError(f"{path} {problem}" if path else problem)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
