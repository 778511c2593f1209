"""Frozen dataclasses to JSON values and back, driven by their annotations.

Missing, unknown and ill-typed keys are refused by name.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Json = Any
Hint = Any


class RecordError(ValueError):
    """A JSON value does not have the form of its record; the message names the key, what was expected and found."""


def to_json(value: Json) -> Json:
    """The JSON form of a record: dataclasses and mappings become objects, tuples become arrays."""
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def from_json(cls: type[T], value: Json, where: str) -> T:
    """The `cls` that `value` describes. `where` names the value in messages. Raises RecordError."""
    result: T = _decode(cls, value, where)
    return result


def _decode(hint: Hint, value: Json, where: str) -> Json:
    origin: Hint = get_origin(hint)
    args = get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(args, value, where)
    if origin is Literal:
        return _one_of(args, value, where)
    if origin is tuple:
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(_expect(list, value, where)))
    if origin is not None and issubclass(origin, Mapping):
        return {k: _decode(args[1], item, f"{where}.{k}") for k, item in _expect(dict, value, where).items()}
    if is_dataclass(hint):
        return _decode_record(hint, _expect(dict, value, where), where)
    if hint is float and type(value) is int:
        return float(value)
    return _expect(hint, value, where)


def _decode_record(cls: Hint, value: dict[str, Any], where: str) -> Json:
    known = {f.name: f for f in fields(cls)}
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if unknown := sorted(set(value) - set(known)):
        raise RecordError(f"{where}: unknown key {', '.join(unknown)}")
    if missing := sorted(required - set(value)):
        raise RecordError(f"{where}: missing key {', '.join(missing)}")
    hints = get_type_hints(cls)
    return cls(**{key: _decode(hints[key], item, f"{where}.{key}") for key, item in value.items()})


def _decode_union(options: tuple[Any, ...], value: Json, where: str) -> Json:
    if value is None and type(None) in options:
        return None
    failures = []
    for option in options:
        if option is not type(None):
            try:
                return _decode(option, value, where)
            except RecordError as error:
                failures.append(str(error))
    raise RecordError(failures[-1])


def _one_of(choices: tuple[Any, ...], value: Json, where: str) -> Json:
    if value not in choices:
        raise RecordError(f"{where}: expected one of {', '.join(map(str, choices))}, found {value!r}")
    return value


def _expect(kind: type, value: Json, where: str) -> Json:
    if type(value) is not kind:
        raise RecordError(f"{where}: expected {kind.__name__}, found {type(value).__name__}")
    return value
