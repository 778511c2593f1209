"""The attention plugin against native attention, over buffers whose stale rows are poisoned.

Here the operator's own body stands for the plugin, and the graph lowered to TensorRT's operators runs on ONNX Runtime;
on a GPU both are engines. Who compares is `compare_outputs`, either way round.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redraft import names
from redraft.bench.gpu_engines import missing
from redraft.config import Precision
from redraft.engines import open_bundle, open_device
from redraft.engines.bundle import Bundle
from redraft.engines.device import Device
from redraft.engines.onnxruntime_device import HostDevice
from redraft.engines.tensorrt import native
from redraft.engines.tensorrt.operators import SINCE
from redraft.engines.tensorrt.prepare import graph_file, prepare
from redraft.engines.tensorrt.target import find_target
from redraft.errors import BackendError
from tests.runtime.devices import tensorrt_device

from .bundles import manifest_of, write_bundle
from .graphs import Decoder, save_verifier
from .test_gpu_outputs import TOLERANCES, build_tiny, compare_outputs

DECODERS = {"llama": Decoder(), "windows": Decoder(windows=(0, 3))}


def lowered(folder: Path, decoder: Decoder) -> tuple[Bundle, Bundle]:
    """A bundle, and the same with its verifier in TensorRT's own operators."""
    write_bundle(folder / "small", decoder)
    bundle = open_bundle(folder / "small", verify=False)
    prepare(bundle.path, "verifier.onnx", names.VERIFIER, SINCE["TensorScatter"], "native")
    record = replace(bundle.graph(names.VERIFIER), file=graph_file(names.VERIFIER))
    return bundle, Bundle(bundle.path, manifest_of(decoder, graphs={names.VERIFIER: record}))


@pytest.mark.parametrize("fakes", [False, True], ids=["onnxruntime", "fakes"])
@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_native_attention_reads_no_stale_row_and_writes_no_other(decoder: Decoder, fakes: bool, tmp_path: Path) -> None:
    """On fakes as TensorRT runs it, with `live` read on the host."""
    bundle, native_bundle = lowered(tmp_path, decoder)
    body: Device = HostDevice(bundle, 1)
    own: Device = HostDevice(native_bundle, 1)
    if fakes:
        (tmp_path / "engines").mkdir()
        body = tensorrt_device(bundle, tmp_path).device
        own = tensorrt_device(native_bundle, tmp_path / "engines", host=(names.LIVE,)).device
    for device, reference in ((own, body), (body, own)):
        errors = compare_outputs(device, reference, bundle, [names.VERIFIER])
        assert len(errors) == 7
        assert max(errors.values()) <= TOLERANCES["float32"]


def sees_all(to: Any, *inputs: Any) -> Any:
    """Rows that each node sees, with those that are stale."""
    return to.node("Or", [visible(to, *inputs), to.constant(True, np.bool_)])


def beyond_live(to: Any, tree_mask: Any, positions: Any, past_len: Any, live: Any, window: int) -> Any:
    """The same with the first sequence's length for all."""
    first = to.node("Slice", [past_len, to.constant([0]), to.constant([1]), to.constant([0])])
    wide = to.node("Expand", [first, to.node("Shape", [past_len])])
    return visible(to, tree_mask, positions, wide, live, window)


visible = native._visible


@pytest.mark.parametrize("fault", [sees_all, beyond_live])
def test_a_stale_row_that_counts_is_seen(fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale rows of the shorter of two sequences lie before `live`: only their values tell that they were read."""
    monkeypatch.setattr(native, "_visible", fault)
    bundle, spoiled = lowered(tmp_path, Decoder())
    with pytest.raises(AssertionError, match=r"verifier, .*: logits: off by"):
        compare_outputs(HostDevice(spoiled, 1), HostDevice(bundle, 1), bundle, [names.VERIFIER])


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_plugin_gives_what_native_attention_does(root: Path, tmp_path: Path, precision: Precision) -> None:
    """Either reads poisoned buffers while the other's are clean."""
    if reason := missing("tensorrt"):
        pytest.skip(reason)
    if reason := native_missing(find_target().release, tmp_path):
        pytest.skip(reason)
    bundles = [build_tiny(root, tmp_path / kind, "tensorrt", precision, kind) for kind in ("plugin", "native")]
    plugin, own = (open_device(bundle, "cuda") for bundle in bundles)
    for device, reference in ((plugin, own), (own, plugin)):
        print(compare_outputs(device, reference, bundles[1], [names.VERIFIER]))


def native_missing(release: tuple[int, int], folder: Path) -> str | None:
    """Why this TensorRT has no attention of its own to compare with, or None: what building with it says."""
    save_verifier(Decoder(layers=1), folder)
    try:
        prepare(folder, "verifier.onnx", names.VERIFIER, release, "native")
    except BackendError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("release", "said"), [((10, 14), "no KV update"), ((11, 1), "not live"), ((10, 15), None)])
def test_native_attention_is_missing_where_it_would_not_be_built(
    release: tuple[int, int], said: str | None, tmp_path: Path
) -> None:
    reason = native_missing(release, tmp_path)
    assert reason is None if said is None else said in str(reason)
