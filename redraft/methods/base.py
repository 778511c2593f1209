"""The specification of a drafting method, which building, engines and inspection work from.

A family's module defines a `Method`, which rows complete. Its functions take the method's shape: a frozen dataclass of
one drafter's sizes.
Symbols of sizes: B sequences, C rows of KV buffers, M rows to catch up on, W pending rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from redraft import names
from redraft.errors import UsageError
from redraft.names import TensorSpec
from redraft.records import PositiveInt, from_plain
from redraft.signatures import Signature, copy_slot_inputs, in_place

S = TypeVar("S")
Rows = Literal["none", "last", "all"]
Sizes = tuple[int, int, int]
"""Smallest, tuned and largest value of a symbol."""
PREFILL, TOKEN, TREE = "prefill", "token", "tree"
"""Names of engine profiles: after a prompt, for one token, for a step with a tree."""


@dataclass(frozen=True)
class GraphSpec(Generic[S]):
    """One graph of a drafter.

    inputs, outputs: the signature for a shape. An in-place output names the input whose buffer it updates.
    exists:      False if a drafter of this shape needs no such graph.
    profiles:    sizes of the graph's symbols by TensorRT profile, without B and C, whose ranges the backend sets.
    integers:    least and largest valid value of integer inputs that only this method has.
    looked_up:   rows of a table that one call reads, by table. A call reads other tables whole.
    chain_steps: steps of the causal chain that the graph unrolls; each updates the KV buffers. None if there is no
                 chain, and then no CPU graph for one sequence.
    one_way:     False if a row may see rows after it, which the CPU's kernel for one sequence hides. Then a chain has
                 no graph for it.
    decoder:     True if the graph has the verifier's inputs and attention, and is lowered for the CPU like it.
    """

    inputs: Callable[[S], tuple[TensorSpec, ...]]
    outputs: Callable[[S], tuple[TensorSpec, ...]]
    exists: Callable[[S], bool] = lambda shape: True
    profiles: Mapping[str, Mapping[str, Sizes]] = field(default_factory=lambda: {TREE: {}})
    integers: Callable[[S], Mapping[str, tuple[int, int]]] = lambda shape: {}
    looked_up: Callable[[S], Mapping[str, int]] = lambda shape: {}
    chain_steps: Callable[[S], int] | None = None
    one_way: Callable[[S], bool] = lambda shape: True
    decoder: bool = False

    def signature(self, shape: S) -> Signature:
        """Inputs and outputs of the graph for this shape."""
        return self.inputs(shape), self.outputs(shape)


@dataclass(frozen=True)
class TreeLimits:
    """The largest tree of one draft: `depth`, `width` of a level, `nodes` without the root."""

    depth: int
    width: int
    nodes: int


def resampled_nodes(nodes: int) -> int:
    """Return the most nodes of a resampled tree, without its root, if a fresh tree has at most `nodes`: half of them.

    Acceptance in a resampled tree decays faster with depth (Lyanna, §6.2). The graphs and fixed budgets use this rule.
    """
    return -(-nodes // 2)


@dataclass(frozen=True)
class NoOptions:
    """Empty options, for a method without any."""


@dataclass(frozen=True)
class BuildOptions:
    """Options for building a drafter that every method has.

    precision: of the drafter's products. None takes the verifier's fp16 or bf16, and int8 with any other verifier. An
               int8 drafter reads fewer bytes between two verifications.
    draft_vocabulary: tokens that can be drafted, the most frequent ones. None takes all that the drafter was trained
               on. A plain checkpoint has no counts of tokens, so it drafts all.
    head_rank: rank of the product with the verifier's head that finds candidates. Only these are multiplied exactly
               (`redraft.export.drafters.draft_head`). None multiplies all tokens exactly.
    """

    precision: Literal["fp32", "fp16", "bf16", "int8", "int4"] | None = None
    draft_vocabulary: PositiveInt | None = None
    head_rank: PositiveInt | None = None

    def check(self, **most: int) -> None:
        """Raise UsageError for a field that is not a number from 1 to this one. None is no number, and allowed."""
        for name, largest in most.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= largest:
                raise UsageError(f"{name} must be a number from 1 to {largest}, not {value}")


@dataclass(frozen=True)
class Method(Generic[S]):
    """A drafting method.

    id, summary:   of the method's row. A family's own specification has none.
    hidden_states: the verifier's hidden states that the drafter reads, unless its shape has a field of this name.
    rows:          all rows of a call, the last, or none.
    graphs:        by role. None for a method without engines.
    shape:         class of the shape; None for a method without engines.
    state:         tensors of a slot, B first; devices allocate and copy them by these specs alone.
    spare_rows:    largest number of rows of the drafter's KV buffers beyond the context.
    tables:        graph inputs that a device binds once, from a file.
    limits:        the largest tree.   describe: the shape in words.
    options:       class of its options at run time.   build_options: class of its options for building.
    takes_checkpoints: True if a drafter may be a plain checkpoint of a decoder.
    native:        True if the verifier's own checkpoint may have a drafter inside.
    training:      name of the command that trains its drafters, if it is not the id.
    """

    id: str = ""
    summary: str = ""
    hidden_states: tuple[str, ...] = ()
    rows: Rows = "none"
    graphs: Mapping[str, GraphSpec[S]] = field(default_factory=dict)
    shape: type[S] | None = None
    state: Callable[[S], tuple[TensorSpec, ...]] = lambda shape: ()
    spare_rows: int = 0
    tables: Callable[[S], tuple[TensorSpec, ...]] = lambda shape: ()
    limits: Callable[[S], TreeLimits] = lambda shape: TreeLimits(0, 0, 0)
    describe: Callable[[S], str] = lambda shape: ""
    options: type[Any] = NoOptions
    build_options: type[BuildOptions] = BuildOptions
    takes_checkpoints: bool = False
    native: bool = False
    training: str = ""

    @property
    def command(self) -> str:
        """The name of the command that trains its drafters, if they can be trained."""
        return self.training or self.id

    @property
    def is_built(self) -> bool:
        """True if a bundle must have a drafter for this method."""
        return self.shape is not None

    def states_of(self, shape: S) -> tuple[str, ...]:
        """Return the verifier's hidden states that a drafter of this shape reads."""
        found: tuple[str, ...] = getattr(shape, "hidden_states", self.hidden_states)
        return found

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
        """Return inputs and outputs by role, including the graph that copies the state to another slot."""
        found = {role: self.graphs[role].signature(shape) for role in self.roles(shape)}
        if state := self.state(shape):
            found[names.COPY_SLOT] = (copy_slot_inputs(state), in_place(state))
        return found
