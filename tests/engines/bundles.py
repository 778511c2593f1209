"""Small bundles of random decoders, in a build's form, and of the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime

from redraft import names, signatures
from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.config import Backend, BuildConfig, Precision, TensorRtBuild
from redraft.engines.bundle import Bundle, BundleWriter, open_bundle
from redraft.engines.device import Device, Program
from redraft.engines.manifest import GraphRecord, Manifest, ModelIdentity
from redraft.engines.tensorrt_records import Attention

from .drafters import WEIGHTS, lyanna_build
from .graphs import Decoder, save_verifier


def manifest_of(decoder: Decoder, name: str = "small", **changes: object) -> Manifest:
    """The manifest of the decoder's portable graph."""
    graph = GraphRecord(
        "verifier.onnx",
        signatures.verifier_inputs(decoder.shape),
        signatures.verifier_outputs(decoder.shape, decoder.hidden_states),
    )
    values = {
        "name": name,
        "model": ModelIdentity("small-source", "LlamaForCausalLM", WEIGHTS),
        "backend": "onnxruntime",
        "backend_version": onnxruntime.__version__,
        "precision": "fp32",
        "shape": decoder.shape,
        "max_model_len": decoder.max_positions,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "hidden_states": decoder.hidden_states,
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


def buffers_of(device: Device, program: Program, **sizes: int) -> dict[str, Any]:
    """Buffers of zeros for every input and output of a program, with these sizes of its symbols."""
    buffers: dict[str, Any] = {}
    for spec in (*program.inputs, *program.outputs):
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        buffers[spec.name] = buffers[spec.in_place_of] if spec.in_place_of else device.empty(spec.dtype, *shape)
    return buffers


def build_tiny(root: Path, out: Path, backend: Backend, precision: Precision, attention: Attention | None) -> Bundle:
    """The embedded model's engines and its drafter's for two sequences at once.

    Raises RedraftError: whatever is missing was asked before (`missing`).
    """
    source = root / "assets" / "tiny"
    drafter = precision if backend == "onnxruntime" else None  # in TensorRT, `compute_dtype`
    options = {"precision": drafter} if drafter else {}
    drafters = (lyanna_build(str(source / "lyanna"), **options),)
    config = BuildConfig(
        backend=backend, precision=precision, hidden_states=(names.LAST_HIDDEN_STATE,), drafters=drafters,
        tensorrt=TensorRtBuild(batch=2, attention=attention or "plugin"),
    )  # fmt: skip
    build_bundle(Model("tiny", str(source), source), config, out, {}, False, lambda message: None)
    return open_bundle(out, verify=False)
