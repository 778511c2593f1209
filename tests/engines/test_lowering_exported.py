"""What the exporter really writes for each architecture lowers, and computes the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from redraft import names, signatures
from redraft.config import BuildConfig
from redraft.engines.bundle import Bundle
from redraft.engines.lowering import lower_single
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_backend import open_engine
from redraft.export.checkpoint import Checkpoint
from redraft.export.verifier import export_verifier
from tests.export.models import write_checkpoint

from .bundles import manifest_of
from .graphs import Decoder
from .test_lowering import CASES, operators, run


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_exported_architectures_lower_and_agree(architecture, tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "checkpoint", architecture))
    exported = export_verifier(checkpoint, tmp_path, BuildConfig(taps=("last", "0")))
    shape = exported.shape
    portable = GraphRecord(
        exported.graph, signatures.verifier_inputs(shape), signatures.verifier_outputs(shape, exported.taps)
    )
    single = lower_single(tmp_path, portable)
    assert single is not None
    found = operators(tmp_path / single.file)
    assert found["GroupQueryAttention"] == shape.layers
    assert ("RotaryEmbedding" in found) == (architecture == "qwen3")
    decoder = Decoder(kv_heads=shape.kv_heads, head_dim=shape.head_dim, vocabulary=shape.vocabulary)
    manifest = replace(manifest_of(decoder), graphs={names.VERIFIER: portable, names.VERIFIER_SINGLE: single})
    engines = [open_engine(Bundle(tmp_path, manifest), graph, threads=1) for graph in manifest.graphs]
    for nodes, past in CASES:
        expected, lowered = (run(engine, decoder, nodes, past) for engine in engines)
        for output, array in expected.items():
            np.testing.assert_allclose(lowered[output], array, atol=1e-4, err_msg=f"{output}, T={nodes}, past={past}")
