"""Small bundles of random decoders, written the way a build writes them."""

from __future__ import annotations

from pathlib import Path

import onnxruntime

from redraft import names, signatures
from redraft.engines.bundle import BundleWriter
from redraft.engines.manifest import GraphRecord, Manifest, ModelIdentity

from .graphs import Decoder, save_verifier


def manifest_of(decoder: Decoder, name: str = "small", **changes: object) -> Manifest:
    """The manifest of the decoder's portable graph."""
    graph = GraphRecord(
        "verifier.onnx",
        signatures.verifier_inputs(decoder.shape),
        signatures.verifier_outputs(decoder.shape, decoder.taps),
    )
    values = {
        "name": name,
        "model": ModelIdentity("small-source", "LlamaForCausalLM", "llama", {"model.safetensors": "0" * 64}),
        "backend": "onnxruntime",
        "backend_version": onnxruntime.__version__,
        "precision": "fp32",
        "shape": decoder.shape,
        "context": decoder.max_positions,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "pad_token_id": None,
        "taps": decoder.taps,
        "graphs": {names.VERIFIER: graph},
    }
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


def write_bundle(out: Path, decoder: Decoder | None = None, name: str = "small", force: bool = False) -> Manifest:
    """Build a bundle of `decoder` at `out`."""
    decoder = decoder or Decoder()
    with BundleWriter(out, name, force=force) as writer:
        save_verifier(decoder, writer.staging)
        (writer.staging / "tokenizer.json").write_text("{}")
        return writer.commit(manifest_of(decoder, name))
