"""Lyanna's two graphs and its table of token information.

    lyanna.draft     catches up on the rows since the last draft, unrolls the chain, one product with the head for its
                     states, the tree of their logits: one call
    lyanna.resample  the tree of the logits that are left after a verification: no weights but the table

The head and the embedding are the verifier's own bytes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import nn

from redraft import names
from redraft.config import LyannaBuild
from redraft.errors import CheckpointError
from redraft.export import modules, passes, tracing
from redraft.export.drafters import token_info
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.lyanna import METHOD, TAP, LyannaConfig, LyannaDrafter
from redraft.export.drafters.token_tree import emit_token_tree, token_tree
from redraft.export.tree_attention import tree_attention
from redraft.export.verifier import VerifierExport, finish
from redraft.export.weights import ModuleSource, Progress, place
from redraft.names import LyannaShape, WeightRef

DRAFT = f"{names.LYANNA_DRAFT}.onnx"
RESAMPLE = f"{names.LYANNA_RESAMPLE}.onnx"
_TRANSLATIONS = {**tracing.TRANSLATIONS, torch.ops.redraft.token_tree.default: emit_token_tree}
_TRACED_ROWS = 3
_TRACED_CAPACITY = 16


@dataclass(frozen=True)
class LyannaExport:
    """What was written beside the verifier: graphs (none resamples a single step), and where weights and tables lie."""

    shape: LyannaShape
    draft: str
    resample: str
    weights: tuple[WeightRef, ...]
    token_info: tuple[WeightRef, ...]


def export_lyanna(
    drafter: DrafterCheckpoint,
    verifier: VerifierExport,
    identity: Identity,
    out: Path,
    options: LyannaBuild,
    progress: Progress = lambda stage, done, total: None,
) -> LyannaExport:
    """Write the graphs of `drafter` into `out`, where the graph of its verifier lies already.

    Raises CheckpointError where the drafter is of another method, was trained for another verifier, or does not load.
    """
    if drafter.method != METHOD:
        raise CheckpointError(f"{drafter.path} is a drafter of method {drafter.method!r}, expected {METHOD!r}")
    settings = drafter.configure(LyannaConfig)
    drafter.check_verifier(settings, verifier.shape.hidden, verifier.shape.vocabulary, identity)
    if TAP not in verifier.taps:
        raise CheckpointError(f"the verifier's graph has no feature {TAP!r}", f'add "{TAP}" to the taps of its recipe')
    module = LyannaDrafter(settings).eval().requires_grad_(False)
    counts = drafter.load(module)
    shape = lyanna_shape(settings, options)
    progress("token information", 0, 1)
    embedding = np.concatenate(list(verifier.source.slabs(verifier.embedding)))
    tables = token_info.write(token_info.make_tables(module, embedding, counts, shape), out)
    progress("trace drafter", 0, 1)
    weights = _export_draft(module, verifier, shape, out, options.precision, progress)
    if shape.steps > 1:
        _export_resample(shape, out)
    return LyannaExport(shape, DRAFT, RESAMPLE, weights, tables)


def lyanna_shape(config: LyannaConfig, options: LyannaBuild) -> LyannaShape:
    """What the graphs will take and give."""
    hot = config.vocab_size if config.vocab_size <= options.prune_above else min(options.hot_tokens, config.vocab_size)
    return LyannaShape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        steps=options.steps or config.steps,
        width=options.width,
        nodes=min(options.nodes + 1, names.tree_size(options.steps or config.steps, options.width)),
        token_info=options.token_info,
        hot=hot,
        rank=config.rank,
    )


class _GraphRotary(nn.Module):
    """Rotation as one operator over precomputed tables of `rows` positions."""

    def __init__(self, rotary: Any, rows: int) -> None:
        super().__init__()
        cos, sin = rotary.tables(torch.arange(rows))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, heads: int) -> torch.Tensor:
        turned: torch.Tensor = modules.rotary(x, self.cos, self.sin, positions, heads, 0)
        return turned


class _Draft(nn.Module):
    """The draft graph's computation; inputs and outputs in the order of `names.lyanna_draft_inputs` and `_outputs`."""

    def __init__(self, drafter: LyannaDrafter, shape: LyannaShape, positions: int) -> None:
        super().__init__()
        self.drafter = copy.deepcopy(drafter)
        self.drafter.token_info = None
        self.drafter.layer.rotary = _GraphRotary(self.drafter.layer.rotary, positions)  # type: ignore[assignment]
        modules.replace_rms_norms(self.drafter)
        size = (shape.vocabulary, shape.hidden)
        self.embedding, self.head = (nn.Parameter(torch.empty(size), requires_grad=False) for _ in range(2))
        self.shape = shape

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, pending: torch.Tensor,
        past_len: torch.Tensor, live: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        caches = [key, value]
        config = self.drafter.config

        def attend_at(places: torch.Tensor, mask: torch.Tensor, past: torch.Tensor, read: torch.Tensor) -> Any:
            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor
                out, caches[0], caches[1] = tree_attention(
                    q, k, v, *caches, mask, places, past, read, config.head_dim**-0.5, 0.0, 0, config.heads,
                    config.kv_heads,
                )  # fmt: skip
                return out

            return attend

        rows = tokens.shape[1]
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()[None].expand(tokens.shape[0], -1, -1)
        attend = attend_at(positions, causal, past_len, live)
        last = (pending - 1)[:, None]
        embeddings = F.embedding(tokens, self.embedding)
        hidden = self.drafter.first(
            features, embeddings, positions, attend, lambda rows: tracing.gather_rows(rows, last)
        )  # [B, 1, n]
        place = positions.gather(1, last)
        alone = torch.ones_like(last, dtype=torch.bool)[:, :, None]
        chain, past = [hidden], past_len + pending
        for _ in range(1, self.shape.steps):
            place, live = place + 1, live + 1
            hidden = self.drafter.following(hidden, place, attend_at(place, alone, past, live))
            chain.append(hidden)
            past = past + 1
        states, scale = torch.cat(chain, dim=1), config.logit_scale * config.sharpness
        logits = F.linear(states if scale == 1.0 else states * scale, self.head)  # [B, N, V], in one product
        roots = tokens.gather(1, last)[:, 0]
        tree = token_tree(logits, roots, roots, tables, self.shape.width, self.shape.nodes, True)
        return (*tree, logits, *caches)


class _Resample(nn.Module):
    """The resample graph's computation; inputs and outputs in the order of `names.lyanna_resample_inputs`."""

    def __init__(self, shape: LyannaShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self, chain_logits: torch.Tensor, first_step: torch.Tensor, tokens: torch.Tensor, tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        steps, nodes = self.shape.steps, names.resample_nodes(self.shape)
        wanted = first_step[:, None] + torch.arange(steps - 1)
        wanted = torch.minimum(wanted, torch.tensor(steps - 1))  # ONNX's Clip is for floats only in TensorRT
        left = tracing.gather_rows(chain_logits, wanted)  # [B, N - 1, V]
        tree = token_tree(left, first_step - 1, tokens, tables, self.shape.width, nodes, False)
        sizes = [min(names.tree_size(remaining, self.shape.width), nodes) for remaining in range(steps)]
        return (*tree, torch.index_select(torch.tensor(sizes), 0, steps - first_step))


def _export_draft(
    module: LyannaDrafter, verifier: VerifierExport, shape: LyannaShape, out: Path, precision: str,
    progress: Progress,
) -> tuple[WeightRef, ...]:  # fmt: skip
    graph = _Draft(module, shape, verifier.shape.max_positions + names.CATCH_UP_ROWS + shape.steps)
    cache = torch.zeros(2, shape.kv_heads, _TRACED_CAPACITY, shape.head_dim)
    rows = torch.arange(_TRACED_ROWS).repeat(2, 1)
    b, m, c = (torch.export.Dim(name, min=low) for name, low in (("B", 1), ("M", 1), ("C", 2)))
    args = (
        torch.zeros(2, _TRACED_ROWS, shape.hidden), rows, rows.clone(), torch.full((2,), 2), torch.full((2,), 1),
        torch.tensor([1 + _TRACED_ROWS]), cache, cache.clone(), token_info.examples(shape),
    )  # fmt: skip
    rows_of, cache_of = {0: b, 1: m}, {0: b, 2: c}
    fixed: list[dict[int, Any]] = [{} for _ in names.token_info_tables(shape)]
    dynamic: tuple[Any, ...] = (rows_of, rows_of, rows_of, {0: b}, {0: b}, {}, cache_of, cache_of, fixed)
    model = tracing.trace_graph(
        graph, args, dynamic, names.lyanna_draft_inputs(shape), names.lyanna_draft_outputs(shape), _TRANSLATIONS
    )
    tensors = {name: tensor.numpy() for name, tensor in graph.drafter.state_dict().items()}
    shared = {"embedding": verifier.embedding, "head": verifier.head}
    passes.simplify(model)
    _rename(model, {**{f"drafter.{name}": f"{METHOD}.{name}" for name in tensors}, **shared})
    source = ModuleSource({f"{METHOD}.{name}": tensor for name, tensor in tensors.items()}, verifier.source)
    refs = place(
        model, source, out, precision, progress, file=METHOD, logits=names.CHAIN_LOGITS, shared=verifier.weights
    )
    finish(model)
    ir.save(model, out / DRAFT)
    return refs


def _export_resample(shape: LyannaShape, out: Path) -> None:
    b = torch.export.Dim("B", min=1)
    args = (
        torch.zeros(2, shape.steps, shape.vocabulary), torch.ones(2, dtype=torch.long),
        torch.zeros(2, dtype=torch.long), token_info.examples(shape),
    )  # fmt: skip
    fixed: list[dict[int, Any]] = [{} for _ in names.token_info_tables(shape)]
    model = tracing.trace_graph(
        _Resample(shape), args, ({0: b}, {0: b}, {0: b}, fixed), names.lyanna_resample_inputs(shape),
        names.lyanna_resample_outputs(shape), _TRANSLATIONS,
    )  # fmt: skip
    passes.simplify(model)
    finish(model)
    ir.save(model, out / RESAMPLE)


def _rename(model: ir.Model, new_names: dict[str, str]) -> None:
    """Give initializers new names; two that get the same one become one."""
    initializers = model.graph.initializers
    for old, new in new_names.items():
        value = initializers.get(old)
        if value is None:
            continue
        if new in initializers:
            ir.convenience.replace_all_uses_with(value, initializers[new])
            del initializers[old]
        else:
            value.name = new
