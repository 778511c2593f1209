"""Tracing and writing of drafters' graphs: their place, their precision, their weights and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch import nn

from redraft import names
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.sources import AnySource, DrafterSource, FactoredSource, RandomSource
from redraft.export.checkpoint.weight_files import FOLDER, STORED, NewTensor, Progress, no_progress, write
from redraft.export.drafters import graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.draft_graph import Sampling
from redraft.export.drafters.draft_head import factored
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.layer import DrafterConfig
from redraft.export.graph import passes, tracing
from redraft.export.graph.decoder import finish
from redraft.export.verifier import VerifierExport
from redraft.export.weights import place
from redraft.methods import Method
from redraft.names import Dtype, Precision, TensorSpec, WeightRef
from redraft.signatures import Signature

_TRACED = {"B": 2, "M": 3, "T": 4, "R": 3, "C": 16}
"""Sizes of the signatures' symbols in a trace."""
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Target:
    """A drafter to write: its id, its verifier's export, their folder, the options for building it, and progress."""

    name: str
    verifier: VerifierExport
    out: Path
    options: Any
    progress: Progress = no_progress

    @property
    def precision(self) -> Precision:
        """The chosen precision, or one that fits the verifier. Raises UsageError for two types in one graph."""
        dtype, chosen = self.dtype, self.options.precision
        fitting = [precision for precision, element in names.ELEMENTS.items() if element == dtype]
        fitting = [precision for precision in fitting if precision != "fp8"]
        chosen = chosen or ("int8" if dtype == "float32" else fitting[0])
        if chosen not in fitting:
            raise UsageError(
                f"a drafter in {chosen} cannot read the features of a verifier in {dtype}",
                f"choose precision={' or '.join(fitting)}",
            )
        precision: Precision = chosen
        return precision

    @property
    def dtype(self) -> Dtype:
        """Element type of features, as the verifier's."""
        return self.verifier.shape.dtype

    @property
    def vocabulary(self) -> int:
        """The verifier's number of tokens."""
        return self.verifier.shape.vocabulary

    def factors(self, source: AnySource, head: str, prefix: str) -> FactoredSource:
        """Return factors of the parameter `head` of `source`, as `factored` does, of the options' rank."""
        return factored(source, head, self.options.head_rank, prefix, self.verifier.second_moment)


def stem(name: str) -> str:
    """Return the prefix of a drafter's parameters in a bundle."""
    return f"{name}."


def check_fit(
    drafter: DrafterCheckpoint, settings: DrafterConfig, verifier: VerifierExport, identity: Identity
) -> None:
    """Raise CheckpointError if a drafter was trained for another verifier, or cannot read its hidden states."""
    drafter.check_verifier(settings, verifier.shape.hidden, verifier.shape.vocabulary, identity)
    for hidden_state in getattr(settings, "hidden_states", (names.LAST_HIDDEN_STATE,)):
        if hidden_state not in verifier.hidden_states:
            raise CheckpointError(
                f"the verifier's graph does not output hidden state {hidden_state!r}",
                f'add "{hidden_state}" to hidden_states in its recipe',
            )


def empty_module(make: Callable[[], M], dtype: Dtype) -> M:
    """Return the module with uninitialized weights, whose pages are never touched."""
    with torch.device("meta"):
        module = make()
        module.to(tracing.TORCH[dtype])
    return module.to_empty(device="cpu").eval().requires_grad_(False)


def parameter_shapes(module: nn.Module, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by their names, after `prefix`."""
    return {f"{prefix}{name}": tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def random_source(target: Target, shapes: Mapping[str, tuple[int, ...]]) -> RandomSource:
    """Return random values for parameters of these shapes, by their names in a bundle."""
    return RandomSource.write(dict(shapes), target.out, STORED[target.precision], f"{stem(target.name)}random")


def trace(
    graph: nn.Module, signature: Signature, group: Callable[[list[Any]], tuple[Any, ...]],
    translations: Mapping[Any, Any] = tracing.TRANSLATIONS,
) -> ir.Model:  # fmt: skip
    """Trace a graph with the sizes of its signature.   group: its inputs, in order -> the arguments of its call."""
    inputs, outputs = signature
    dims = {symbol: torch.export.Dim(symbol, min=2 if symbol == "C" else 1) for symbol in _TRACED}
    varying = [{place: dims[dim] for place, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in inputs]
    return tracing.trace_graph(graph, group([*map(_example, inputs)]), group(varying), inputs, outputs, translations)


def _example(spec: TensorSpec) -> torch.Tensor:
    """Return zeros of a shape and type. A table's take no memory."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if all(isinstance(dim, int) for dim in spec.shape):
        return torch.zeros(1, dtype=dtype).expand([int(dim) for dim in spec.shape])
    return torch.zeros([_TRACED[dim] if isinstance(dim, str) else dim for dim in spec.shape], dtype=dtype)


def trace_draft(
    graph: nn.Module, shape: Any, method: Method[Any], translations: Mapping[Any, Any] = tracing.TRANSLATIONS,
    role: str = names.DRAFT,
) -> ir.Model:  # fmt: skip
    """Trace a graph that makes a tree.

    graph: takes features, a list if they are several hidden states, its other inputs, a list of KV buffers if there are
    any, a `Sampling`, a list of tables.
    """
    states, tables = len(method.states_of(shape)), len(method.tables(shape))
    signature = method.graphs[role].signature(shape)
    buffers = sum(names.is_cache(spec.name) for spec in signature[0])

    def group(inputs: list[Any]) -> tuple[Any, ...]:
        features, end = inputs[:states] if states > 1 else inputs[0], len(inputs) - tables
        begin = end - len(Sampling._fields)
        caches = [inputs[begin - buffers : begin]] if buffers else []
        return (features, *inputs[states : begin - buffers], *caches, Sampling(*inputs[begin:end]), inputs[end:])

    return trace(graph, signature, group, translations)


def write_traced(
    target: Target, model: ir.Model, own: AnySource, vocabulary: DraftVocabulary, logits: str = "",
    own_head: bool = False,
) -> tuple[WeightRef, ...]:  # fmt: skip
    """Write a traced draft graph, and place its weights. The embedding is the verifier's own bytes.

    The head is too if the draft vocabulary is the whole one. Otherwise it is a weight of the drafter's own, rows of the
    verifier's head, unless the drafter was trained with a head of its own (`own_head`).

    model:  its parameters are `drafter.NAME`, `embedding` and `head.NAME`.   own: source of the drafter's parameters.
    logits: the output of the product with the head, which keeps the verifier's precision; "" for none.
    """
    prefix, verifier = stem(target.name), target.verifier
    passes.simplify(model)
    own_names = {f"drafter.{parameter.removeprefix(prefix)}": parameter for parameter in own.parameters}
    head = None if own_head else vocabulary.head(verifier.source, verifier.head, f"{prefix}head")
    head_name = f"{prefix}head.weight" if own_head else head.name if head else verifier.head
    new_names = {**own_names, "embedding": verifier.embedding, "head.weight": head_name}
    source = DrafterSource(DrafterSource(own, head) if head else own, verifier.source)
    if target.options.head_rank:
        factors = target.factors(source, head_name, f"{prefix}head.")
        new_names |= {name.removeprefix(prefix): name for name in factors.parameters}
        source = DrafterSource(factors, source)
    return write_graph(target, model, new_names, source, names.DRAFT, verifier.weights, logits)


def write_graph(
    target: Target, model: ir.Model, new_names: dict[str, str], source: AnySource, role: str = names.DRAFT,
    shared: tuple[WeightRef, ...] = (), logits: str = "",
) -> tuple[WeightRef, ...]:  # fmt: skip
    """Write a simplified graph and its weights. Returns their places.

    new_names: of its parameters.   shared: places of the verifier's weights.   logits: as in `write_traced`.
    """
    rename(model, new_names)
    file = target.name if role == names.DRAFT else f"{stem(target.name)}{role}"
    refs = place(
        model, source, target.out, target.precision, target.progress, file=file, logits=logits, shared=shared
    )  # fmt: skip
    finish(model)
    ir.save(model, target.out / graph_file(target.name, role))
    return refs


def write_tables(name: str, tables: Sequence[NewTensor], folder: Path) -> tuple[WeightRef, ...]:
    """Write a drafter's tables below `folder`. Returns their places; none if there are no tables."""
    if not tables:
        return ()
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    return tuple(write(list(tables), folder, f"{FOLDER}/{stem(name)}tables.safetensors"))


def rename(model: ir.Model, new_names: dict[str, str]) -> None:
    """Rename initializers. Two that get the same name become one."""
    initializers = model.graph.initializers
    for old, new in new_names.items():
        value = initializers.get(old)
        if value is None or old == new:
            continue
        if new in initializers:
            ir.convenience.replace_all_uses_with(value, initializers[new])
            del initializers[old]
        else:
            value.name = new
