"""Calls of a program over the host's arrays, one for each set of sizes: fill, run and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redraft.engines.device import Array, Program, Run, numpy_type, sized
from redraft.engines.host_device import HostBuffer, aligned_zeros
from redraft.names import Dtype, TensorSpec

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, eq=False)
class Call:
    """A program over arrays of one set of sizes. The call owns the arrays; every run overwrites `outputs`.

    inputs, outputs: by name, without arrays of `Calls.bind`.
    run:             reads `inputs` and the bound arrays, writes `outputs` and the bound arrays.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    run: Run


class Calls:
    """The calls of one program of the host. Use them from one thread."""

    def __init__(self, program: Program) -> None:
        self.inputs, self.outputs = program.inputs, program.outputs
        self._program = program
        self._dtypes: dict[str, Dtype] = {spec.name: spec.dtype for spec in (*self.inputs, *self.outputs)}
        self._bound: dict[str, Array] = {}
        self._parts: dict[tuple[str, int, int], HostBuffer] = {}
        self._calls: dict[tuple[tuple[str, int], ...], Call] = {}
        self._bindable = {spec.name: spec for spec in (*self.inputs, *self.outputs) if spec.in_place_of is None}

    def bind(self, name: str, array: Array) -> None:
        """Use this C-contiguous array for the input or output `name` of every call, and for outputs in its place.

        A call uses an entry for each of its sequences, the first ones by default. Drops all prepared calls.
        Raises ValueError on an unknown name, and on an element type or a shape that does not fit.
        """
        spec = self._bindable.get(name)
        if spec is None:
            raise ValueError(f"no input or output {name!r} to bind, expected one of {', '.join(self._bindable)}")
        if array.dtype != numpy_type(spec.dtype) or not array.flags.c_contiguous:
            raise ValueError(f"{name}: expected a C-contiguous {spec.dtype} array, found {array.dtype}")
        if not _fits(spec, array.shape):
            raise ValueError(f"{name}: expected shape {spec.shape}, found {array.shape}")
        self._bound[name] = array
        self._parts.clear()
        self._calls.clear()

    def prepare(self, **sizes: int) -> Call:
        """Return the call for these sizes of the symbols (`B`, `T`, `R` …), made on first use and stored.

        Symbols of bound arrays only (`C`) come from the arrays. Raises ValueError on a missing or unknown symbol.
        """
        key = tuple(sorted(sizes.items()))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self.make(sizes)
        return call

    def make(
        self, sizes: Mapping[str, int], first: int = 0, like: Call | None = None,
        arrays: Mapping[str, Array] | None = None,
    ) -> Call:  # fmt: skip
        """Return a call for these sizes without storing it.

        first:  index of the bound arrays' first entry to use.
        like:   a call of the same sizes, whose arrays the new one shares.   arrays: others to use, by name.
        Raises ValueError like `prepare`.
        """
        updated = {spec.in_place_of for spec in self.outputs if spec.in_place_of}
        if unbound := sorted(updated - set(self._bound)):
            raise ValueError(f"bind {', '.join(unbound)} first")
        inputs = {spec.name: spec for spec in self.inputs if spec.name not in self._bound}
        outputs = {spec.name: spec for spec in self.outputs if not spec.in_place_of and spec.name not in self._bound}
        own = {**inputs, **outputs}
        symbols = {dim for spec in own.values() for dim in spec.shape if isinstance(dim, str)}
        if symbols != set(sizes):
            raise ValueError(
                f"expected sizes of {', '.join(sorted(symbols))}, found {', '.join(sorted(sizes)) or 'none'}"
            )
        given = {**like.inputs, **like.outputs} if like else arrays or {}
        used = {name: given[name] if name in given else aligned(spec, sizes) for name, spec in own.items()}
        buffers = {name: self._part(name, sizes, first) for name in self._bound}
        buffers |= {name: HostBuffer.of(self._dtypes[name], array) for name, array in used.items()}
        buffers |= {spec.name: buffers[spec.in_place_of] for spec in self.outputs if spec.in_place_of}
        run = self._program.bind(buffers)
        return Call({name: used[name] for name in inputs}, {name: used[name] for name in outputs}, run)

    def _part(self, name: str, sizes: Mapping[str, int], first: int) -> HostBuffer:
        """Return the entries of a bound array from `first` on, one for each sequence of a call."""
        array = self._bound[name]
        leading = self._bindable[name].shape[0]
        count = sizes.get(leading, len(array) - first) if isinstance(leading, str) else leading
        wanted = first + count
        if wanted > len(array):
            raise ValueError(
                f"{name}: expected {leading} of at most {len(array)}, the bound array's length, found {wanted}"
            )
        key = name, first, wanted
        if key not in self._parts:
            self._parts[key] = HostBuffer.of(self._dtypes[name], array[first:wanted])
        return self._parts[key]


def aligned(spec: TensorSpec, sizes: Mapping[str, int]) -> Array:
    """Return an array of zeros of the tensor's shape, aligned to a cache line."""
    return aligned_zeros(sized(spec.shape, sizes), numpy_type(spec.dtype), _ALIGNMENT_BYTES)


def _fits(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
    if len(shape) != len(spec.shape) or (isinstance(spec.shape[0], int) and shape[0] < spec.shape[0]):
        return False
    return all(isinstance(dim, str) or dim == size for dim, size in zip(spec.shape[1:], shape[1:], strict=True))
