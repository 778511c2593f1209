"""Export a checkpoint as a verifier graph: one ONNX file for prefill, one token and trees, and its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from redraft import names, signatures
from redraft.config import BuildConfig
from redraft.export import weights
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.loading import LoadedTensors, check_finite, load_tensors
from redraft.export.checkpoint.sources import AnySource, RandomSource, Source
from redraft.export.checkpoint.weight_files import STORED, Progress, no_progress
from redraft.export.graph import passes, tracing
from redraft.export.graph.decoder import TracedDecoder, finish, trace_decoder
from redraft.export.quantization.product_forms import ProductPlan
from redraft.export.quantization.product_weights import ProductWeight
from redraft.export.reference import first_layers
from redraft.names import WeightRef

GRAPH = "verifier.onnx"


@dataclass(frozen=True)
class VerifierExport:
    """An exported verifier. `graph` and the files of `weights` are relative to the output folder.

    embedding, head: the parameters that drafters share.   source: the source of the parameters' values.
    second_moment: mean of x xᵀ over final hidden states x on text, [n, n]; None if no drafter needs it.
    """

    shape: signatures.VerifierShape
    hidden_states: tuple[str, ...]
    graph: str
    weights: tuple[WeightRef, ...]
    embedding: str
    head: str
    source: AnySource
    second_moment: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class TracedVerifier:
    """A traced checkpoint, from which verifiers of several precisions are written.

    loaded: the stored tensors, None for random weights.
    """

    checkpoint: AnyCheckpoint
    architecture: Architecture
    loaded: LoadedTensors | None
    decoder: TracedDecoder
    hidden_states: tuple[str, ...]

    @cached_property
    def products(self) -> tuple[ProductWeight, ...]:
        """The weights of the graph's products, each once, and without one that computes anything but a layer's part."""
        weights = (
            ProductWeight.of(n, self.decoder.parameters) for n in self.decoder.model.graph if n.op_type == "MatMul"
        )
        return tuple(dict.fromkeys(weight for weight in weights if weight is not None))

    @cached_property
    def source(self) -> Source:
        """The checkpoint's tensors by parameter. Not for random weights."""
        return Source(self.checkpoint, self.decoder.parameters, self.decoder.tensors)


def trace_verifier(checkpoint: AnyCheckpoint, config: BuildConfig, layers: int | None = None) -> TracedVerifier:
    """Trace a checkpoint's graph, which is the same in all precisions of one compute type.

    layers: number of its first layers that the graph has, all by default. Raises UnsupportedModelError naming a part
    that cannot be exported, CheckpointError naming a tensor that is missing or of the wrong shape.
    """
    text_config = model_config.load_config(checkpoint)
    architecture = Architecture.of(text_config if layers is None else first_layers(text_config, layers))
    text = architecture.text
    shape = model_config.verifier_shape(text, config.max_model_len, names.ELEMENTS[config.compute_dtype])
    model_config.check_rope(text, shape.max_positions)
    loaded = None if config.random_weights else load_tensors(checkpoint, architecture, partly=layers is not None)
    if loaded:
        text.tie_word_embeddings = loaded.tied
        check_finite(checkpoint)
    traced = trace_decoder(
        architecture,
        shape,
        checkpoint,
        loaded,
        lambda network, recorded, shape: tracing.trace(
            tracing.VerifierModule(network, config.hidden_states, recorded), shape
        ),
        config.hidden_states,
    )
    passes.simplify(traced.model)
    return TracedVerifier(checkpoint, architecture, loaded, traced, config.hidden_states)


def write_verifier(
    traced: TracedVerifier, out: Path, config: BuildConfig, progress: Progress = no_progress,
    plan: ProductPlan | None = None,
) -> VerifierExport:  # fmt: skip
    """Write `out`/verifier.onnx and `out`/weights/ of a traced checkpoint in a precision.

    plan: bits of each product; by default, those of the precision. Reads only weights that need another type.
    """
    decoder, model = traced.decoder, traced.decoder.model.clone()
    shape = replace(decoder.shape, kv=names.ELEMENTS[config.kv] if config.kv else None)
    if config.kv:
        passes.set_cache_type(model, ir.DataType.from_numpy(np.dtype(shape.kv_dtype)))
    source: AnySource = (
        traced.source if traced.loaded else RandomSource.write(decoder.parameters, out, STORED[config.compute_dtype])
    )
    kind = config.weight_only
    refs = weights.place(
        model, source, out, config.precision if kind is None else config.compute_dtype, progress,
        file=config.precision, weight_only=kind, plan=plan,
    )  # fmt: skip
    finish(model)
    ir.save(model, out / GRAPH)
    return VerifierExport(shape, traced.hidden_states, GRAPH, refs, decoder.embedding, decoder.head, source)
