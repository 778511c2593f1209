"""The exporter's graph of each architecture lowers, with equal results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from redraft import names, signatures
from redraft.config import BuildConfig
from redraft.engines import open_calls
from redraft.engines.bundle import Bundle
from redraft.engines.lowering import lower_packed, lower_single
from redraft.engines.manifest import GraphRecord
from redraft.export.checkpoint.safetensors import Checkpoint
from tests.engines.bundles import manifest_of
from tests.engines.graphs import Decoder
from tests.export.models import export_verifier, write_checkpoint

from .test_graphs import CASES, operators, run


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_exported_architectures_lower_and_agree(architecture, tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "checkpoint", architecture))
    exported = export_verifier(checkpoint, tmp_path, BuildConfig(hidden_states=("last", "0")))
    shape = exported.shape
    portable = GraphRecord(
        exported.graph, signatures.verifier_inputs(shape), signatures.verifier_outputs(shape, exported.hidden_states)
    )
    single, batch = lower_single(tmp_path, portable), lower_packed(tmp_path, portable)
    assert single is not None
    assert batch is not None
    graphs = {names.VERIFIER: portable, names.VERIFIER_BATCH: batch, names.VERIFIER_SINGLE: single}
    found = operators(tmp_path / single.file)
    assert found["GroupQueryAttention"] == shape.layers
    assert ("RotaryEmbedding" in found) == (architecture == "qwen3")
    decoder = Decoder(kv_heads=shape.kv_heads, head_dim=shape.head_dim, vocabulary=shape.vocabulary)
    bundle = Bundle(tmp_path, replace(manifest_of(decoder), graphs=graphs))
    first, *others = (open_calls(bundle, graph, threads=1) for graph in graphs)
    for engine in others:
        chain = all(spec.name != names.TREE_MASK for spec in engine.inputs)
        for nodes, past in CASES:
            expected, lowered = (run(one, decoder, nodes, past, chain) for one in (first, engine))
            for output, array in expected.items():
                message = f"{output}, T={nodes}, past={past}"
                np.testing.assert_allclose(lowered[output], array, atol=1e-4, err_msg=message)
