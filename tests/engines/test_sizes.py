"""A bundle's size: hard links are not its own, and every number counts once, in its stored form."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import onnx
import pytest
from onnx import helper

from redraft.engines.manifest import FileRecord, GraphRecord
from redraft.engines.sizes import (
    describe_shares,
    describe_size,
    engine_bytes,
    own_bytes,
    total_bytes,
    weight_shares,
)
from redraft.engines.tensorrt_records import EngineRecord, TensorRtRecord
from redraft.names import VERIFIER, WeightRef
from tests.engines.bundles import manifest_of
from tests.engines.graphs import Decoder

_offsets = count()


def ref(name: str, dtype: str, *shape: int) -> WeightRef:
    return WeightRef(name, "weights/w.safetensors", next(_offsets), 0, dtype, shape)


def test_hard_links_are_not_the_bundle_s_own(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "shard").write_bytes(b"s" * 100)
    os.link(tmp_path / "shard", tmp_path / "bundle/linked")
    (tmp_path / "bundle/written").write_bytes(b"w" * 7)
    files = {"linked": FileRecord(100, ""), "written": FileRecord(7, "")}
    manifest = replace(manifest_of(Decoder()), files=files)
    assert total_bytes(manifest) == 107
    assert own_bytes(tmp_path / "bundle", manifest) == 7
    assert describe_size(107_000_000, 7_000_000) == ("107.0 MB, of which 7.0 MB are its own and the rest hard links")
    assert describe_size(7_000_000, 7_000_000) == "7.0 MB"


def test_engines_and_weights_that_were_copied_for_them() -> None:
    sizes = {"verifier.engine": 100, "step.accept.engine": 3, "verifier.tensorrt.weights": 40, "weights/w.bin": 60}
    files = {name: FileRecord(size, "") for name, size in sizes.items()}
    engines = {
        name: EngineRecord(f"{name}.engine", f"{name}.tensorrt.onnx", ()) for name in ("verifier", "step.accept")
    }
    record = TensorRtRecord("10.13.3", "GPU", "9.0", "plugin", engines=engines)
    manifest = replace(manifest_of(Decoder()), files=files)
    assert engine_bytes(manifest) == (0, 0)
    assert engine_bytes(replace(manifest, backend="tensorrt", tensorrt=record)) == (103, 40)


def with_products(folder: Path, weights: Iterable[WeightRef], **bits: int) -> Mapping[str, float]:
    """Write a graph with a product over the codes of each name, and return the shares."""
    nodes = [
        helper.make_node("MatMulNBits", ["x", f"{name}.codes"], ["y"], domain="com.microsoft", bits=its)
        for name, its in bits.items()
    ]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [])), folder / "verifier.onnx")
    manifest = manifest_of(Decoder())
    graphs = {VERIFIER: GraphRecord("verifier.onnx", (), ())}
    return weight_shares(folder, replace(manifest, weights=tuple(weights), graphs=graphs))


def test_shares_count_codes_by_their_bits_and_no_scales(tmp_path: Path) -> None:
    weights = (
        ref("up.codes", "U8", 6, 10, 16), ref("up.scales", "F32", 6, 10), ref("up.zeros", "U8", 6, 5),
        ref("six.codes", "U8", 3, 20, 16), ref("six.scales", "F32", 3, 20), ref("six.smoothing", "F32", 320),
        ref("embedding", "F32", 3, 320),
    )  # fmt: skip
    shares = with_products(tmp_path, weights, up=4, six=8)
    assert shares == pytest.approx({"4 bits": 0.5, "8 bits": 0.25, "fp32": 0.25})
    assert describe_shares(shares) == "50.0 % in 4 bits, 25.0 % in 8 bits, 25.0 % in fp32"


def test_rows_that_are_looked_up_in_a_products_codes_count_once(tmp_path: Path) -> None:
    rows, codes = ref("head.rows", "U8", 3, 320), ref("head.codes", "U8", 3, 10, 32)
    shares = with_products(tmp_path, (rows, replace(codes, offset=rows.offset), ref("norm", "F32", 320)), head=8)
    assert shares == pytest.approx({"8 bits": 0.75, "fp32": 0.25})


def test_shares_of_codes_that_tensorrt_reads(tmp_path: Path) -> None:
    weights = (
        ref("up.int4", "I4", 320, 6), ref("up.int4.scales", "F16", 5, 6), ref("down.int8", "I8", 32, 30),
        ref("head", "F16", 32, 30),
    )  # fmt: skip
    assert with_products(tmp_path, weights) == pytest.approx({"4 bits": 0.5, "8 bits": 0.25, "fp16": 0.25})
