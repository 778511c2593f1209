"""Where weights end up: the checkpoint's own bytes, or a converted file, and the numbers are right either way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.numpy_helper import to_array
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file

from redraft.config import BuildConfig
from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export import weights
from redraft.export.checkpoint import Checkpoint
from redraft.export.verifier import export_verifier

from .models import write_checkpoint


def export(source: Path, out: Path, **config):
    out.mkdir()
    return export_verifier(Checkpoint.open(source), out, BuildConfig(**config))


def initializers(out: Path) -> dict[str, np.ndarray]:
    return {t.name: to_array(t, str(out)) for t in onnx.load(out / "verifier.onnx").graph.initializer}


def test_fp32_weights_are_the_checkpoint_s_own_bytes(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama", shard_size="100KB")
    done = export(source, tmp_path / "out")
    checkpoint, graph = Checkpoint.open(source), initializers(tmp_path / "out")
    assert set(done.weight_files) == {f"weights/{file}" for file in checkpoint.files}
    assert {ref.source for ref in done.weights} == {(name,) for name in checkpoint.tensors}
    for ref in done.weights:
        entry = checkpoint.tensors[ref.source[0]]
        assert (ref.file, ref.offset, ref.length) == (f"weights/{entry.file}", entry.offset, entry.length)
        np.testing.assert_array_equal(graph[ref.initializer], checkpoint.memmap(entry.name))


def test_large_shards_are_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "LINK_FROM_BYTES", 1)
    source = write_checkpoint(tmp_path / "model", "llama")
    export(source, tmp_path / "out")
    assert (tmp_path / "out/weights/model.safetensors").samefile(source / "model.safetensors")


def test_bf16_is_converted_exactly(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    done = export(source, tmp_path / "out")
    stored, graph = load_torch(source / "model.safetensors"), initializers(tmp_path / "out")
    assert done.weight_files == ("weights/fp32.safetensors",)
    assert len(done.weights) == len(stored)
    for name, tensor in stored.items():
        np.testing.assert_array_equal(graph[name], tensor.float().numpy())


def test_written_file_is_safetensors(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama", dtype=torch.float16)
    done = export(source, tmp_path / "out")
    assert set(load_file(tmp_path / "out" / done.weight_files[0])) == {ref.initializer for ref in done.weights}


def test_slabs_do_not_change_the_content(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    export(source, tmp_path / "whole", precision="int4")
    monkeypatch.setattr(weights, "SLAB_BYTES", 1000)
    export(source, tmp_path / "slabs", precision="int4")
    assert (tmp_path / "whole/weights/int4.safetensors").read_bytes() == (
        tmp_path / "slabs/weights/int4.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.45), ("int4", 0.35)])
def test_quantized_bundle_stores_no_weight_twice(tmp_path, precision, most):
    """Nothing that a quantized product replaced is written too: what stays fp32 is the embedding and the gains."""
    source = write_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    done = export(source, tmp_path / "out", precision=precision)
    whole = {ref.initializer for ref in done.weights if ref.dtype == "F32" and not ref.initializer.endswith("scales")}
    assert {name for name in whole if "norm" not in name} == {"model.embed_tokens.weight"}
    fp32_bytes = 2 * (source / "model.safetensors").stat().st_size
    assert (tmp_path / "out" / done.weight_files[0]).stat().st_size < most * fp32_bytes


def test_tied_head_is_stored_once(tmp_path):
    source = write_checkpoint(tmp_path / "model", "qwen2")
    export(source, tmp_path / "out")
    assert "lm_head.weight" not in initializers(tmp_path / "out")


def test_missing_tensor_is_named(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama")
    tensors = load_torch(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        export(source, tmp_path / "out")


def test_tensor_of_another_shape_is_named(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama")
    tensors = load_torch(source / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[7\], config\.json asks for \[48\]"):
        export(source, tmp_path / "out")


def test_quantized_storage_is_refused(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama")
    tensors = load_torch(source / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is stored as I8"):
        export(source, tmp_path / "out")


def test_unknown_storage_is_refused_by_name(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama")
    tensors = load_torch(source / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.float8_e4m3fn)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is stored as F8_E4M3"):
        export(source, tmp_path / "out")


def test_random_weights_need_no_shard_and_repeat(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama")
    contents = []
    for name in ("first", "second"):
        done = export(source, tmp_path / name, random_weights=True)
        assert all(ref.source == () for ref in done.weights)
        contents.append((tmp_path / name / done.weight_files[0]).read_bytes())
    assert contents[0] == contents[1]
    std = initializers(tmp_path / "first")["model.layers.0.mlp.up_proj.weight"].std()
    assert 0.9 * weights.RANDOM_STD < std < 1.1 * weights.RANDOM_STD
