"""Shared parts of draft graphs that read hidden states and unroll a chain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import nn

from redraft import names
from redraft.config import Precision
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.sources import AnySource, DrafterSource, RandomSource
from redraft.export.checkpoint.weight_files import FOLDER, STORED, NewTensor, Progress, write
from redraft.export.drafters import graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.layer import Attend, DrafterConfig, LayerConfig
from redraft.export.graph import modules, passes, tracing
from redraft.export.graph.decoder import finish
from redraft.export.graph.noise import add_noise
from redraft.export.graph.tree_attention import tree_attention
from redraft.export.verifier import VerifierExport
from redraft.export.weights import place
from redraft.names import Dtype, TensorSpec, WeightRef

_TORCH = {"float16": torch.float16, "float32": torch.float32, "int8": torch.int8, "uint8": torch.uint8,
          "int64": torch.int64}  # fmt: skip
_TRACED_ROWS = 3
_TRACED_KV_ROWS = 16
M = TypeVar("M", bound=nn.Module)
A = TypeVar("A")
"""How rows attend."""


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


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by name."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def random_source(name: str, module: nn.Module, precision: Precision, out: Path) -> RandomSource:
    """Return random values for the module's parameters, by their names in a bundle."""
    shapes = {f"{stem(name)}{parameter}": shape for parameter, shape in parameter_shapes(module).items()}
    return RandomSource.write(shapes, out, STORED[precision], f"{stem(name)}random")


def drafter_precision(chosen: Precision | None, verifier: VerifierExport) -> Precision:
    """Return the chosen precision, or one that fits the verifier. Raises UsageError for two types in one graph."""
    dtype = verifier.shape.dtype
    fitting = [precision for precision, element in names.ELEMENTS.items() if element == dtype]
    fitting = [precision for precision in fitting if precision != "fp8"]
    chosen = chosen or ("int8" if dtype == "float32" else fitting[0])
    if chosen not in fitting:
        raise UsageError(
            f"a drafter in {chosen} cannot read the features of a verifier in {dtype}",
            f"choose precision={' or '.join(fitting)}",
        )
    return chosen


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probabilities and the columns of the `count` likeliest tokens, [..., count], of logits [..., H].

    ONNX Runtime's LogSoftmax takes 7 microseconds for three rows of 12,288 columns, and its ReduceLogSumExp 120.
    """
    columns = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count, -1).indices
    return torch.log_softmax(logits, -1).gather(-1, columns), columns


class GraphRotary(nn.Module):
    """Rotation as one operator over precomputed tables of `rows` positions."""

    def __init__(self, rotary: Any, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        cos, sin = (table.to(dtype) for table in rotary.tables(torch.arange(rows)))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, heads: int) -> torch.Tensor:
        turned: torch.Tensor = modules.rotary(x, self.cos, self.sin, positions, heads, 0)
        return turned


class ChainRows(ABC, Generic[A]):
    """The rows of a draft: all rows to catch up on, then one row a step. Each writes its rows to the KV buffers.

    A subclass says how rows attend, by `_at`.
    """

    def __init__(
        self, positions: torch.Tensor, pending: torch.Tensor, cache_len: torch.Tensor, kv_len: torch.Tensor,
        key: torch.Tensor, value: torch.Tensor,
    ) -> None:  # fmt: skip
        self.caches = [key, value]
        self._positions, self._cache_len, self._kv_len = positions, cache_len, kv_len
        self._last = (pending - 1)[:, None]
        self._place, self._step_cache_len = positions.gather(1, self._last), cache_len + pending
        self._alone = torch.ones_like(self._last, dtype=torch.bool)[:, :, None]

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the last pending row of [B, M, n], as [B, 1, n]."""
        last: torch.Tensor = tracing.gather_rows(rows, self._last)
        return last

    def last_token(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last pending token of [B, M], as [B, 1]."""
        return tokens.gather(1, self._last)

    def catch_up(self) -> A:
        """Attend for all rows. Each row sees the rows before it."""
        batch, rows = self._positions.shape
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()[None].expand(batch, -1, -1)
        return self._at(self._positions, causal, self._cache_len)

    def next_step(self) -> tuple[torch.Tensor, A]:
        """Return the position [B, 1] of the next step's row, and attend for that row, which sees all rows before it."""
        self._place, self._kv_len = self._place + 1, self._kv_len + 1
        attend = self._at(self._place, self._alone, self._step_cache_len)
        self._step_cache_len = self._step_cache_len + 1
        return self._place, attend

    @abstractmethod
    def _at(
        self, places: torch.Tensor, mask: torch.Tensor, cache_len: torch.Tensor, kv_len: torch.Tensor | None = None
    ) -> A:
        """Attend for rows at `places` [B, T] after `cache_len` [B] rows. Rows see each other by `mask` [B, T, T]."""


class ChainAttention(ChainRows[Attend]):
    """Attention of a drafter's own layer."""

    def __init__(self, config: LayerConfig, *rows: torch.Tensor) -> None:
        """`rows` are the arguments of `ChainRows`."""
        super().__init__(*rows)
        self._config = config

    def _at(
        self, places: torch.Tensor, mask: torch.Tensor, cache_len: torch.Tensor, kv_len: torch.Tensor | None = None
    ) -> Attend:
        config, kv_len = self._config, self._kv_len if kv_len is None else kv_len

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor
            out, self.caches[0], self.caches[1] = tree_attention(
                q, k, v, *self.caches, mask, places, cache_len, kv_len, None, config.head_dim**-0.5, 0.0, 0, 0,
                config.heads, config.kv_heads,
            )  # fmt: skip
            return out

        return attend


class LevelAttention(ChainAttention):
    """Attention of a draft's tree: all rows to catch up on, then W rows a level, which see their ancestors.

    A level's call has the rows of all levels so far, as the operator's mask covers the rows of one call only. Queries,
    keys and values of earlier levels are kept, so that only their attention is computed again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._levels: list[list[torch.Tensor]] = [[], [], [], []]  # queries, keys, values, positions
        self._mask: torch.Tensor | None = None

    def next_level(self, width: int, parents: torch.Tensor) -> tuple[torch.Tensor, Attend]:
        """Return positions [B, W] of the next level's rows, and attend for those rows.

        parents: [B, W], the rows of the level before that are their parents. The first level's parent is the root.
        """
        rows = torch.arange(width)  # torch.eye becomes a Cast to uint8, which no TensorRT takes
        own = (rows[:, None] == rows)[None].expand(parents.shape[0], -1, -1)
        if self._mask is None:
            self._mask = own
        else:
            above = tracing.gather_rows(self._mask[:, -width:], parents)
            earlier = torch.nn.functional.pad(self._mask, (0, width))
            self._mask = torch.cat([earlier, torch.cat([above, own], dim=2)], dim=1)
        queries, keys, values, positions = self._levels
        self._place = self._place + 1
        positions.append(self._place.expand(-1, width))
        places = torch.cat(positions, dim=1)
        level = self._at(places, self._mask, self._step_cache_len, self._kv_len + places.shape[1])

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for kept, new in ((queries, q), (keys, k), (values, v)):
                kept.append(new)
            every = [torch.cat(kept, dim=1) for kept in (queries, keys, values)]
            return level(*every)[:, -width:]

        return positions[-1], attend


class Sampling(NamedTuple):
    """The inputs of `methods.chains.sampling_inputs`, in order."""

    scale: torch.Tensor
    noise_scale: torch.Tensor
    keys: torch.Tensor
    drawn: torch.Tensor

    @classmethod
    def example(cls, steps: int) -> Sampling:
        """Return values for two sequences and trees of `steps` levels, to trace a graph with."""
        keys = torch.ones(2, steps, 2, dtype=torch.long)
        return cls(torch.ones(2), torch.zeros(2), keys, torch.zeros(2, dtype=torch.long))

    def noisy(self, logits: torch.Tensor, tables: Sequence[torch.Tensor], step: int = 0) -> torch.Tensor:
        """Return logits [B, S, H] of the levels from `step` on, with noise. A draft vocabulary is the last table."""
        ids = tables[-1] if tables else torch.arange(logits.shape[2])
        noisy: torch.Tensor = add_noise(logits, self.noise_scale, self.keys[:, step : step + logits.shape[1]], ids)
        return noisy

    @classmethod
    def dims(cls, batch: Any) -> Any:
        """Return the sizes that vary, for `torch.export`."""
        every: list[Any] = [{0: batch}] * len(cls._fields)
        return cls(*every)


class DraftGraph(nn.Module, Generic[M]):
    """A drafter with the verifier's embedding and the rows of its head for H tokens. A subclass computes the draft.

    It changes the drafter that it wraps: rotation becomes one operator over every position that a draft can reach.
    """

    def __init__(self, drafter: M, config: DrafterConfig, shape: Any, max_positions: int) -> None:
        super().__init__()
        dtype = tracing.TORCH[shape.dtype]
        self.drafter, self.shape = drafter, shape
        self._prepare(drafter, max_positions + names.CATCH_UP_ROWS + shape.steps)
        self.embedding, self.head = (
            nn.Parameter(torch.empty(rows, shape.hidden, dtype=dtype), requires_grad=False)
            for rows in (shape.vocabulary, shape.draft_vocabulary)
        )
        self._scale = config.logit_scale

    def _prepare(self, drafter: M, positions: int) -> None:
        """Replace the drafter's rotation and norms by single operators."""
        layer: Any = drafter.layer
        layer.rotary = GraphRotary(layer.rotary, positions, tracing.TORCH[self.shape.dtype])
        modules.replace_rms_norms(drafter)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, T, n] of tokens [B, T]."""
        return F.embedding(tokens, self.embedding)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, H] in fp32 of states [B, T, n], times the verifier's own logit scale."""
        return F.linear(states if self._scale == 1.0 else states * self._scale, self.head).float()


def write_draft(
    name: str, graph: nn.Module, own: AnySource, vocabulary: DraftVocabulary, verifier: VerifierExport, shape: Any,
    out: Path, precision: Precision, progress: Progress,
    signature: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]], tables: tuple[TensorSpec, ...],
    translations: Mapping[Any, Any] = tracing.TRANSLATIONS, logits: str = "", states: int = 1, own_head: bool = False,
) -> tuple[WeightRef, ...]:  # fmt: skip
    """Trace the graph of a draft that catches up on rows, and write it as `write_traced` does.

    graph: takes features, tokens, positions, num_pending, cache_len, kv_len, key, value, a `Sampling`, tables.
    states: number of hidden states that it reads; features are a list of several.
    """
    dtype = tracing.TORCH[shape.dtype]
    cache = torch.zeros(2, shape.kv_heads, _TRACED_KV_ROWS, shape.head_dim, dtype=dtype)
    rows = torch.arange(_TRACED_ROWS).repeat(2, 1)
    b, m, c = (torch.export.Dim(symbol, min=low) for symbol, low in (("B", 1), ("M", 1), ("C", 2)))
    features = [torch.zeros(2, _TRACED_ROWS, shape.hidden, dtype=dtype) for _ in range(states)]
    args: tuple[Any, ...] = (
        features if states > 1 else features[0], rows, rows.clone(), torch.full((2,), 2),
        torch.full((2,), 1), torch.tensor([1 + _TRACED_ROWS]), cache, cache.clone(),
        Sampling.example(shape.steps), examples(tables),
    )  # fmt: skip
    rows_of, cache_of = {0: b, 1: m}, {0: b, 2: c}
    fixed: list[dict[int, Any]] = [{} for _ in tables]
    dynamic: tuple[Any, ...] = (
        [rows_of] * states if states > 1 else rows_of,
        rows_of,
        rows_of,
        {0: b},
        {0: b},
        {},
        cache_of,
        cache_of,
        Sampling.dims(b),
        fixed,
    )
    model = tracing.trace_graph(graph, args, dynamic, *signature, translations)
    return write_traced(name, model, own, vocabulary, verifier, out, precision, progress, logits, own_head)


def write_traced(
    name: str, model: ir.Model, own: AnySource, vocabulary: DraftVocabulary, verifier: VerifierExport, out: Path,
    precision: Precision, progress: Progress, logits: str = "", own_head: bool = False,
) -> tuple[WeightRef, ...]:  # fmt: skip
    """Write a traced draft graph, and place its weights. The embedding is the verifier's own bytes.

    The head is too if the draft vocabulary is the whole one. Otherwise it is a weight of the drafter's own, rows of the
    verifier's head, unless the drafter was trained with a head of its own (`own_head`).

    model:  its parameters are `drafter.NAME`, `embedding` and `head`.
    logits: the output of the product with the head, which keeps the verifier's precision; "" for none.
    """
    passes.simplify(model)
    own_names = {f"drafter.{parameter.removeprefix(stem(name))}": parameter for parameter in own.parameters}
    head = None if own_head else vocabulary.head(verifier.source, verifier.head, f"{stem(name)}head")
    head_name = f"{stem(name)}head.weight" if own_head else head.name if head else verifier.head
    rename(model, {**own_names, "embedding": verifier.embedding, "head": head_name})
    source = DrafterSource(DrafterSource(own, head) if head else own, verifier.source)
    refs = place(model, source, out, precision, progress, file=name, logits=logits, shared=verifier.weights)
    finish(model)
    ir.save(model, out / graph_file(name, names.DRAFT))
    return refs


def examples(tables: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return zeros of the right shapes and types, which take no memory, to trace a graph with."""
    return [torch.zeros(1, dtype=_TORCH[spec.dtype]).expand([int(dim) for dim in spec.shape]) for spec in tables]


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
