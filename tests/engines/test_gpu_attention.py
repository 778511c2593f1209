"""The attention plugin against native attention, over buffers whose stale rows are poisoned.

Here the operator's own body stands for the plugin, and the graph lowered to TensorRT's operators runs on ONNX Runtime;
on a GPU both are engines. Who compares is `compare_outputs`, either way round.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redraft import names
from redraft.bench.gpu import missing
from redraft.config import Precision
from redraft.engines import open_bundle, open_device
from redraft.engines import tensorrt_device as module
from redraft.engines.bundle import Bundle
from redraft.engines.host_device import HostDevice
from redraft.engines.tensorrt import native
from redraft.engines.tensorrt.operators import SINCE
from redraft.engines.tensorrt.prepare import graph_file, prepare
from redraft.engines.tensorrt.target import find_target
from redraft.errors import BackendError
from tests.engines.drafters import LYANNA_DRAFT, with_graphs
from tests.engines.graphs import for_onnxruntime

from .bundles import build_tiny, write_bundle
from .graphs import Decoder, save_verifier
from .outputs import TOLERANCES, compare_outputs

GRAPHS = (names.VERIFIER, LYANNA_DRAFT, names.STEP_COMPACT_KV)
"""Graphs that TensorRT's own operators compute differently from plugin and kernels."""
DECODERS = {"llama": Decoder(), "windows": Decoder(windows=(0, 3))}


def lower(bundle: Bundle, folder: Path) -> Bundle:
    """A copy of the bundle in `folder` with the graphs in TensorRT's own operators."""
    shutil.copytree(bundle.path, folder, copy_function=os.link)
    records = dict(bundle.manifest.all_graphs)
    for graph in GRAPHS:
        if graph in records:
            prepare(folder, records[graph].file, graph, SINCE["TensorScatter"], "native")
            for_onnxruntime(folder / graph_file(graph))
            records[graph] = replace(records[graph], file=graph_file(graph))
            for form in {names.batch(graph), names.operators(graph)} & set(records):
                records[form] = records[graph]  # the host prefers these forms
    return Bundle(folder, with_graphs(bundle.manifest, records))


def lowered(folder: Path, decoder: Decoder) -> tuple[Bundle, Bundle]:
    """A bundle of a verifier, and the same in TensorRT's own operators."""
    write_bundle(folder / "small", decoder)
    bundle = open_bundle(folder / "small", verify=False)
    return bundle, lower(bundle, folder / "native")


def both_ways(bundle: Bundle, native_bundle: Bundle, graphs: Sequence[str]) -> Iterator[dict[str, float]]:
    """Errors by call with poisoned buffers on each side.

    Rows of a chain do not count, since native attention never writes them.
    """
    body, own = HostDevice(bundle, 1), HostDevice(native_bundle, 1)
    for device, reference in ((own, body), (body, own)):
        yield compare_outputs(device, reference, bundle, graphs, left=False)


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_native_attention_reads_no_stale_row_and_writes_no_other(decoder: Decoder, tmp_path: Path) -> None:
    for errors in both_ways(*lowered(tmp_path, decoder), [names.VERIFIER]):
        assert len(errors) == 7
        assert max(errors.values()) <= TOLERANCES["float32"]


def test_native_attention_drafts_the_same(lyanna_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(lyanna_bundle, verify=False)
    own = lower(bundle, tmp_path / "native")
    for errors in both_ways(bundle, own, GRAPHS):
        assert {where.partition(",")[0] for where in errors} == set(GRAPHS)
        assert max(errors.values()) <= TOLERANCES["float32"]
    with pytest.raises(AssertionError, match=r"lyanna\.draft, .*: kv\.0\.key\.present: "):
        compare_outputs(HostDevice(own, 1), HostDevice(bundle, 1), bundle, [LYANNA_DRAFT])


def sees_all(to: Any, *inputs: Any) -> Any:
    """Rows that each node sees, including stale rows."""
    return to.node("Or", [visible(to, *inputs), to.constant(True, np.bool_)])


visible = native._visible


def test_a_stale_row_that_counts_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale rows of the shorter sequence are before `kv_len`, so only their values show that they were read."""
    monkeypatch.setattr(native, "_visible", sees_all)
    bundle, spoiled = lowered(tmp_path, Decoder())
    with pytest.raises(AssertionError, match=r"verifier, .*: logits: off by"):
        compare_outputs(HostDevice(spoiled, 1), HostDevice(bundle, 1), bundle, [names.VERIFIER])


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_plugin_equals_native_attention(
    root: Path, tmp_path: Path, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads poisoned buffers while the other's are clean. With the plugin, redraft's kernel compacts rows.

    Attention is in a bundle's carrier, which is one of these three whatever weights are quantized to.
    """
    if reason := missing("tensorrt"):
        pytest.skip(reason)
    if reason := native_missing(find_target().release, tmp_path):
        pytest.skip(reason)
    bundles = [build_tiny(root, tmp_path / kind, "tensorrt", precision, kind) for kind in ("plugin", "native")]
    plugin = open_device(bundles[0], "cuda")
    monkeypatch.setattr(module, "find_kernels", lambda: None)
    own = open_device(bundles[1], "cuda")
    for device, reference in ((plugin, own), (own, plugin)):
        print(compare_outputs(device, reference, bundles[1], GRAPHS, left=False))


def native_missing(release: tuple[int, int], folder: Path) -> str | None:
    """The reason why this TensorRT has no attention for the comparison, from a build's error, or None."""
    save_verifier(Decoder(layers=1), folder)
    try:
        prepare(folder, "verifier.onnx", names.VERIFIER, release, "native")
    except BackendError as error:
        return str(error)
    return None
