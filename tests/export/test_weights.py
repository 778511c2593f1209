"""Weights are the checkpoint's own bytes or a converted file, with the right numbers in both."""

from __future__ import annotations

from dataclasses import replace
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
from redraft.errors import UnsupportedModelError
from redraft.export.checkpoint import base, sources
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.verifier import VerifierExport
from tests.export.models import export_verifier, write_checkpoint

pytestmark = pytest.mark.usefixtures("traced_once")


def export(source: Path, out: Path, **config):
    out.mkdir()
    return export_verifier(Checkpoint.open(source), out, BuildConfig(**config))


def files_of(done: VerifierExport) -> set[str]:
    return {ref.file for ref in done.weights}


def initializers(out: Path) -> dict[str, np.ndarray]:
    return {t.name: to_array(t, str(out)) for t in onnx.load(out / "verifier.onnx").graph.initializer}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_weights_of_the_precision_are_the_checkpoint_s_own_bytes(tmp_path, precision, dtype):
    source = write_checkpoint(tmp_path / "model", "llama", shard_size="50KB", dtype=dtype)
    done = export(source, tmp_path / "out", precision=precision)
    checkpoint, graph = Checkpoint.open(source), initializers(tmp_path / "out")
    assert files_of(done) == {f"weights/{file}" for file in checkpoint.files}
    stored = {ref: done.source.names(ref.initializer) for ref in done.weights}
    assert set(stored.values()) == {(name,) for name in checkpoint.tensors}
    for ref, (name,) in stored.items():
        entry = checkpoint.tensors[name]
        assert (ref.file, ref.offset, ref.length) == (f"weights/{entry.file}", entry.offset, entry.length)
        assert graph[ref.initializer].tobytes() == checkpoint.memmap(entry.name).tobytes()


def test_large_shards_are_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LINK_FROM_BYTES", 1)
    source = write_checkpoint(tmp_path / "model", "llama")
    export(source, tmp_path / "out")
    assert (tmp_path / "out/weights/model.safetensors").samefile(source / "model.safetensors")


@pytest.mark.parametrize(
    ("stored", "precision", "rounded"),
    [
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float32, "fp16", torch.float16),
        (torch.float32, "bf16", torch.bfloat16),
    ],
)
def test_weights_of_another_type_are_converted(tmp_path, stored, precision, rounded):
    source = write_checkpoint(tmp_path / "model", "llama", dtype=stored)
    done = export(source, tmp_path / "out", precision=precision)
    tensors, graph = load_torch(source / "model.safetensors"), initializers(tmp_path / "out")
    assert files_of(done) == {f"weights/{precision}.safetensors"}
    assert len(done.weights) == len(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(graph[name].astype(np.float32), tensor.to(rounded).float().numpy())


def test_numbers_that_fp16_cannot_hold_are_refused(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    tensors = load_torch(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has numbers that fp16 cannot hold"):
        export(source, tmp_path / "out", precision="fp16")


def test_slabs_do_not_change_the_content(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    export(source, tmp_path / "whole", precision="int4")
    monkeypatch.setattr(base, "SLAB_BYTES", 1000)
    export(source, tmp_path / "slabs", precision="int4")
    assert (tmp_path / "whole/weights/int4.safetensors").read_bytes() == (
        tmp_path / "slabs/weights/int4.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("precision", "most", "dtype"), [("int8", 0.45, torch.bfloat16), ("int4", 0.35, torch.float32)]
)
def test_quantized_bundle_stores_no_weight_twice(tmp_path, precision, most, dtype):
    """Only the embedding and the gains are fp32. Those of an fp32 checkpoint would add all its other bytes."""
    source = write_checkpoint(tmp_path / "model", "llama", dtype=dtype)
    done = export(source, tmp_path / "out", precision=precision)
    whole = {ref.initializer for ref in done.weights if ref.dtype == "F32" and not ref.initializer.endswith("scales")}
    assert {name for name in whole if "norm" not in name} == {"model.embed_tokens.weight"}
    assert [path.name for path in (tmp_path / "out/weights").iterdir()] == [f"{precision}.safetensors"]
    assert set(load_file(tmp_path / "out" / done.weights[0].file)) == {ref.initializer for ref in done.weights}
    numbers = (source / "model.safetensors").stat().st_size // dtype.itemsize
    assert (tmp_path / "out" / done.weights[0].file).stat().st_size < most * 4 * numbers
    stored, graph = load_torch(source / "model.safetensors"), initializers(tmp_path / "out")
    embedding = stored["model.embed_tokens.weight"].float().numpy()
    np.testing.assert_array_equal(graph["model.embed_tokens.weight"], embedding)


def test_shard_of_which_a_quantized_bundle_uses_most_stays_as_it_is(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama", shard_size="19KB")
    done, checkpoint = export(source, tmp_path / "out", precision="int8"), Checkpoint.open(source)
    shard = checkpoint.tensors["model.embed_tokens.weight"].file
    assert {name for name, entry in checkpoint.tensors.items() if entry.file == shard} == {"model.embed_tokens.weight"}
    assert f"weights/{shard}" in files_of(done)
    assert len(files_of(done)) < len(checkpoint.files)


def test_random_weights_are_pieces_of_one_pool_and_repeat(tmp_path):
    """They need no shard. Written bytes do not grow with the layers. Slabs, which give tables, equal the weights."""
    source = write_checkpoint(tmp_path / "model", "llama")
    contents = []
    for name in ("first", "second"):
        done = export(source, tmp_path / name, random_weights=True, precision="fp16")
        assert files_of(done) == {"weights/random.safetensors"}
        contents.append((tmp_path / name / "weights/random.safetensors").read_bytes())
    assert contents[0] == contents[1]
    largest = max(ref.length for ref in done.weights)
    assert len(contents[0]) < largest + 2 * sources.POOL_SHIFT * sources.POOL_SHIFTS + 4096
    graph = initializers(tmp_path / "first")
    one, other = (graph[f"model.layers.{layer}.mlp.up_proj.weight"].astype(np.float32) for layer in range(2))
    assert 0.9 * sources.RANDOM_STD < one.std() < 1.1 * sources.RANDOM_STD
    assert not np.array_equal(one, other)
    assert (graph["model.norm.weight"] == 1).all()
    (bias,) = replace(done.source, parameters={"a.bias": (4,)}).slabs("a.bias")
    assert (bias == 0).all()
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        np.testing.assert_array_equal(np.concatenate(list(done.source.slabs(name))).astype(np.float16), graph[name])
