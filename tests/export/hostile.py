"""Damaged and hostile headers of GGUF and safetensors files, the same ones for a seed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

HUGE = (0, 1, 2, 255, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 63) - 1, (1 << 64) - 1)
"""Counts, lengths and offsets."""
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ODD: tuple[Any, ...] = (
    -1, 0, 1, 1 << 31, 1 << 62, 1e300, 0.5, float("nan"), float("inf"), True, "", "llama", "\0", "x" * 3000, [], [0],
    [1, 2, 3], ["a", "b"], [1.5, 2.5], [-1] * 40,
)  # fmt: skip
"""Values of metadata in place of the right ones."""


def gguf_string(text: str | bytes) -> bytes:
    """A string with its length."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """A value of metadata with its type."""
    if isinstance(value, list):
        items = [gguf_value(item) for item in value or [0]]
        return struct.pack("<I", ARRAY) + items[0][:4] + struct.pack("<Q", len(value)) + b"".join(i[4:] for i in items)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + gguf_string(value)
    kind = {bool: 7, int: 11, float: 12}[type(value)]
    return struct.pack(f"<I{CODES[kind]}", kind, value)


def gguf_header(
    keys: Sequence[tuple[str, bytes]],
    tensors: Sequence[tuple[str, Sequence[int], int, int]],
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A header of these keys with packed values, and of tensors as name, axes, type and offset."""
    count, key_count = counts or (len(tensors), len(keys))
    parts = [b"GGUF", struct.pack("<IQQ", 3, count, key_count)]
    parts += [gguf_string(key) + value for key, value in keys]
    for name, axes, kind, offset in tensors:
        parts.append(gguf_string(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset))
    return b"".join(parts)


def damaged(valid: bytes, header_bytes: int, random: Random) -> bytes:
    """The file with some bytes of its header changed, or cut short, or with other numbers in it."""
    data = bytearray(valid)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        at = random.randrange(header_bytes)
        change = random.randrange(6)
        if change == 0:
            data[at] ^= 1 << random.randrange(8)
        elif change == 1:
            data[at : at + 4] = struct.pack("<I", random.choice(HUGE) & 0xFFFFFFFF)
        elif change == 2:
            data[at : at + 8] = struct.pack("<Q", random.choice(HUGE))
        elif change == 3:
            del data[at : at + random.randrange(1, 40)]
        elif change == 4:
            data[at:at] = random.randbytes(random.randrange(1, 40))
        else:
            return bytes(data[:at])
    return bytes(data)


def hostile_gguf(random: Random) -> bytes:
    """A small file whose counts, strings, arrays or tensors are not what they seem."""
    llama = ("general.architecture", gguf_value("llama"))
    many, some = random.choice(HUGE), random.randrange(3000)
    kind = random.choice((*range(32), 34, 39, 199))
    at, item = random.choice((*HUGE, 16, 32)), random.choice((*CODES, STRING, ARRAY, 13))
    shapes: list[Callable[[], bytes]] = [
        lambda: gguf_header([llama], [], (many, 1)),
        lambda: gguf_header([llama], [], (0, many)),
        lambda: gguf_header([llama, ("a", struct.pack("<IQ", STRING, many))], []),
        lambda: gguf_header([llama, ("a", struct.pack("<IIQ", ARRAY, item, many))], []),
        lambda: gguf_header([llama, ("a", struct.pack("<I", ARRAY) * some)], []),
        lambda: gguf_header([llama, ("a", struct.pack("<IIQ", ARRAY, ARRAY, 1) * some)], []),
        lambda: gguf_header([(f"{n}", gguf_value(0)) for n in range(some)], []),
        lambda: gguf_header([llama] * (some % 4), [("a", (8,), 0, 0)]) + bytes(64),
        lambda: (
            gguf_header([("general.architecture", gguf_value(random.choice(ODD)))], [("a", (8,), 0, 0)]) + bytes(99)
        ),
        lambda: gguf_header([llama, ("general.alignment", gguf_value(random.choice(ODD)))], [("a", (4,), 0, 0)]),
        lambda: gguf_header([llama], [(f"{n}", (), 0, 0) for n in range(some)]) + bytes(64),
        lambda: gguf_header([llama], [("a", (many,) * random.randrange(9), kind, 0)]) + bytes(64),
        lambda: gguf_header([llama], [("a", (8,), 0, 0), ("b", (8,), 0, at)]) + bytes(99),
        lambda: gguf_header([llama], [("a", (256,), kind, 0)]) + bytes(2000),
        lambda: b"GGUF" + random.randbytes(random.randrange(200)),
        lambda: random.randbytes(random.randrange(200)),
    ]
    return random.choice(shapes)()


def safetensors(header: bytes, data: int = 64, length: int | None = None) -> bytes:
    """A safetensors file with this header and `data` zero bytes."""
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(data)


NUMBERS: tuple[Any, ...] = (-1, 0, 4, 8, 16, 64, 1 << 31, 1 << 63, 10**30, 0.5, 4.0, True, None, "4", [4], {}, [[]])


def hostile_safetensors(random: Random) -> bytes:
    """A small file whose JSON header is not what it seems."""
    pick = lambda: random.choice(NUMBERS)  # noqa: E731
    tensor = lambda **other: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **other}  # noqa: E731
    depth = random.randrange(1, 200_000)
    headers: list[Callable[[], bytes]] = [
        lambda: json.dumps({"a": tensor(shape=[pick() for _ in range(random.randrange(4))])}).encode(),
        lambda: json.dumps({"a": tensor(shape=pick())}).encode(),
        lambda: json.dumps({"a": tensor(data_offsets=[pick(), pick()])}).encode(),
        lambda: json.dumps({"a": tensor(data_offsets=pick())}).encode(),
        lambda: json.dumps({"a": tensor(dtype=random.choice(("F32", "I4", "", 5, None, [], {}, "F8_E4M3")))}).encode(),
        lambda: json.dumps({"a": pick()}).encode(),
        lambda: json.dumps({"a": tensor(), "b": tensor(data_offsets=[b := random.randrange(0, 40), b + 16])}).encode(),
        lambda: json.dumps({"__metadata__": pick(), "a": tensor()}).encode(),
        lambda: b'{"a":' + json.dumps(tensor()).encode() + b',"a":' + json.dumps(tensor()).encode() + b"}",
        lambda: b"[" * depth + b"]" * depth,
        lambda: b'{"a":' * depth,
        lambda: b'{"a":{"shape":' + b"[" * depth + b"]" * depth + b"}}",
        lambda: b'{"a":{"dtype":"F32","shape":[' + b"1," * depth + b'1],"data_offsets":[0,4]}}',
        lambda: b'{"a":{"dtype":"F32","shape":[' + b"9" * depth + b'],"data_offsets":[0,4]}}',
        lambda: b'{"__metadata__":{"a":' + b"[]," * depth + b"[]}}",
        lambda: b'{"' + b"\\ud800" * (depth % 999) + b'":' + json.dumps(tensor()).encode() + b"}",
        lambda: random.choice((b"", b"{} ", b" {}", b"[]", b"null", b"{,}", b'{"a"}', b"\xef\xbb\xbf{}", b"{}{}")),
        lambda: random.randbytes(random.randrange(200)),
    ]  # fmt: skip
    length = random.choice(HUGE) if random.random() < 0.1 else None
    return safetensors(random.choice(headers)(), random.choice((0, 16, 64)), length)
