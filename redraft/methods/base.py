"""The specification of a drafting method, which building, engines and inspection work from.

A method's own file fills in a `Method`. Its functions take the method's shape: a frozen dataclass of the sizes that one
drafter was built with. Symbols of sizes: B sequences, C rows of KV buffers, M rows to catch up on, W pending rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from redraft import names
from redraft.names import TensorSpec
from redraft.records import from_plain
from redraft.signatures import Signature, move_inputs, move_outputs

S = TypeVar("S")
Rows = Literal["none", "last", "all"]
Sizes = tuple[int, int, int]
"""Smallest, tuned and largest value of a symbol."""
PREFILL, TOKEN, TREE = "prefill", "token", "tree"
"""Names of engine profiles: after a prompt, for one token, for a step with a tree."""


def no_sizes(shape: Any) -> Mapping[str, Any]:
    """Return an empty mapping: the graph has nothing of the kind."""
    return {}


def always(shape: Any) -> bool:
    """Return True: every drafter of the method has the graph."""
    return True


def no_tensors(shape: Any) -> tuple[TensorSpec, ...]:
    """Return no tensors."""
    return ()


@dataclass(frozen=True)
class GraphSpec(Generic[S]):
    """One graph of a drafter.

    inputs, outputs: the signature by the shape. An output in place names the input whose buffer it updates.
    exists:      False if a drafter of this shape needs no such graph.
    profiles:    sizes of the graph's symbols by TensorRT profile. B and C have ranges of their own and are left out.
    integers:    least and largest valid value of integer inputs that only this method has.
    looked_up:   rows of a table that one call reads, by table; other tables are read whole.
    chain_steps: steps of the causal chain that the graph unrolls, each of which updates the KV buffers. The CPU's form
                 for one sequence is made of such a graph; None makes none.
    """

    inputs: Callable[[S], tuple[TensorSpec, ...]]
    outputs: Callable[[S], tuple[TensorSpec, ...]]
    exists: Callable[[S], bool] = always
    profiles: Mapping[str, Mapping[str, Sizes]] = field(default_factory=lambda: {TREE: {}})
    integers: Callable[[S], Mapping[str, tuple[int, int]]] = no_sizes
    looked_up: Callable[[S], Mapping[str, int]] = no_sizes
    chain_steps: Callable[[S], int] | None = None

    def signature(self, shape: S) -> Signature:
        """Inputs and outputs of the graph for this shape."""
        return self.inputs(shape), self.outputs(shape)


@dataclass(frozen=True)
class TreeLimits:
    """The largest tree of one draft: `depth`, `width` of a level, `nodes` without the root."""

    depth: int
    width: int
    nodes: int


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none."""


@dataclass(frozen=True)
class BuildOptions:
    """Options for building a drafter that every method has.

    precision: of the drafter's products. None: int8, which is less to read between two verifications, and fp16 or bf16
               with a verifier of that precision, whose features, embedding and head the drafter reads.
    """

    precision: Literal["fp32", "fp16", "bf16", "int8", "int4"] | None = None


@dataclass(frozen=True)
class Method(Generic[S]):
    """A drafting method.

    id:            the method's word in a drafter's configuration, in recipes and manifests.
    summary:       one sentence for command lines.
    hidden_states: the verifier's hidden states that it reads.   rows: all rows of a call, the last row, or none.
    graphs:        by role. None for a method without engines.
    shape:         class of the shape; None for a method without engines.
    state:         tensors of a slot, B first; allocated, moved and sized by their specs alone.
    spare_rows:    largest number of rows of its KV buffers beyond the context.
    tables:        inputs of its graphs that are bound once, from a file.
    limits:        the largest tree.   describe: the shape in words.
    options:       class of its options at run time.   build_options: class of its options for building.
    """

    id: str
    summary: str
    hidden_states: tuple[str, ...] = ()
    rows: Rows = "none"
    graphs: Mapping[str, GraphSpec[S]] = field(default_factory=dict)
    shape: type[S] | None = None
    state: Callable[[S], tuple[TensorSpec, ...]] = no_tensors
    spare_rows: int = 0
    tables: Callable[[S], tuple[TensorSpec, ...]] = no_tensors
    limits: Callable[[S], TreeLimits] = lambda shape: TreeLimits(0, 0, 0)
    describe: Callable[[S], str] = lambda shape: ""
    options: type[Any] = NoOptions
    build_options: type[BuildOptions] = BuildOptions

    @property
    def is_built(self) -> bool:
        """True if a bundle must have a drafter for this method."""
        return self.shape is not None

    def parse_shape(self, values: Mapping[str, Any]) -> S:
        """Return the shape that a manifest describes. Raises UsageError for unknown, missing or wrong values."""
        assert self.shape is not None, f"{self.id} has no shape"
        return from_plain(self.shape, values, f"shape of {self.id}")

    def parse_build(self, values: Mapping[str, Any], where: str) -> Any:
        """Return the options for building. Raises UsageError for an unknown key or a wrong value."""
        return from_plain(self.build_options, values, where)

    def parse_options(self, values: Mapping[str, Any]) -> Any:
        """Return the options at run time. Raises UsageError for an unknown key or a wrong value."""
        return from_plain(self.options, values, self.id)

    def roles(self, shape: S) -> Iterator[str]:
        """Yield the roles of graphs that a drafter of this shape has."""
        return (role for role, graph in self.graphs.items() if graph.exists(shape))

    def signatures(self, shape: S) -> dict[str, Signature]:
        """Return inputs and outputs by role, with those of the graph that copies the state to another slot."""
        found = {role: self.graphs[role].signature(shape) for role in self.roles(shape)}
        if state := self.state(shape):
            found[names.COPY_SLOT] = (move_inputs(state), move_outputs(state))
        return found
