"""Buffers and bindings, over ONNX Runtime and over TensorRT on fakes: refusals, and the order of copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from redraft import names, signatures
from redraft.engines.bundle import BundleWriter, open_bundle
from redraft.engines.cuda import Cuda
from redraft.engines.device import Buffer, Device, slots_of
from redraft.engines.host_device import HostDevice
from redraft.engines.manifest import GraphRecord
from redraft.engines.tensorrt_device import TensorRtDevice
from redraft.export.graph.step_graphs import export_step_graphs
from redraft.runtime.steps.bound_step import slot_copy
from tests.standins.cuda import FakeCuda
from tests.standins.tensorrt import FakeTensorRt, write_engine

from .bundles import buffers_of, manifest_of
from .fake_onnxruntime import onnxruntime_cuda
from .graphs import Decoder, save_verifier

DECODER = Decoder(layers=1, vocabulary=11)
GRAPHS = (names.STEP_PREPARE_TREE, names.STEP_COMPACT_KV)
Change = Callable[[Device, dict[str, Buffer]], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the graphs of a step."""
    out = tmp_path_factory.mktemp("bundle") / "small"
    with BundleWriter(out, "small") as writer:
        save_verifier(DECODER, writer.staging)
        (writer.staging / "tokenizer.json").write_text("{}")
        files = export_step_graphs(DECODER.shape, writer.staging, gathers=False)
        manifest = manifest_of(DECODER)
        of_graphs = signatures.step_signatures(DECODER.shape, gathers=False)
        graphs = {name: GraphRecord(file, *of_graphs[name]) for name, file in files.items()}
        writer.commit(manifest_of(DECODER, graphs={**manifest.graphs, **graphs}))
    return out


@pytest.fixture(params=["onnxruntime", "onnxruntime on a GPU", "tensorrt"])
def device(request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    bundle = open_bundle(folder)
    if request.param == "onnxruntime on a GPU":
        return onnxruntime_cuda(bundle, monkeypatch)
    if request.param == "onnxruntime":
        return HostDevice(bundle, 1)
    cuda = FakeCuda()
    engines = {name: write_engine(tmp_path / name, (folder / f"{name}.onnx").resolve()) for name in GRAPHS}
    return TensorRtDevice(bundle, engines, Cuda(cuda, 256), FakeTensorRt(cuda))


def layout_buffers(device: Device, sequences: int = 2, nodes: int = 3) -> dict[str, Buffer]:
    return buffers_of(device, device.program(names.STEP_PREPARE_TREE), B=sequences, T=nodes, S=nodes)


def test_a_copy_is_put_in_order_and_may_run_again(device: Device) -> None:
    """The run copies the current `source` to all of `target`, which may describe the same bytes differently."""
    source, target = device.empty("int64", 40), device.empty("uint8", 4, 80)
    assert not target.read().any()
    copy = device.copy(target, source)
    for first in (0, 1 << 40):
        values = np.arange(first, first + 40)
        source.write(values)
        copy()
        source.write(values * 0)
        np.testing.assert_array_equal(target.read().reshape(-1).view(np.int64), values)


def test_a_copy_between_sizes_that_do_not_agree_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="expected buffers of the same size, found 24 and 32 bytes"):
        device.copy(device.empty("int64", 3), device.empty("float32", 8))


@pytest.mark.parametrize("shape", [(3,), (5, 40), (1, 2, 70)])
@pytest.mark.parametrize("dtype", ["int64", "bool", "bfloat16"])
def test_written_values_are_read_and_the_array_is_free_at_once(
    device: Device, dtype: str, shape: tuple[int, ...]
) -> None:
    """Also arrays larger than the staging memory, and many small ones."""
    kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
    buffers = [device.empty(dtype, *shape) for _ in range(4)]  # type: ignore[arg-type]
    values = (np.arange(np.prod(shape)).reshape(shape) % 7).astype(kind)
    expected = []
    for turn, buffer in enumerate(buffers):
        expected.append((values * (turn % 2)).astype(kind) if turn else values.copy())
        given = expected[-1].copy()
        buffer.write(given if turn else np.asfortranarray(given))
        given[...] = 1
    for buffer, wanted in zip(buffers, expected, strict=True):
        np.testing.assert_array_equal(buffer.read(), wanted)


def test_another_type_or_shape_is_not_written(device: Device) -> None:
    for values in (np.zeros(3, np.int64), np.zeros((1, 2), np.int64), np.zeros(2, np.int32), np.zeros(2)):
        with pytest.raises(ValueError, match=r"expected int64\[2\], found"):
            device.empty("int64", 2).write(values)


def test_a_part_is_within_the_whole(device: Device) -> None:
    whole = device.empty("int64", 4, 3)
    whole.write(np.arange(12).reshape(4, 3))
    part = whole.part(2, 2)
    assert part.address == whole.address
    assert part.read().tolist() == [[0, 1], [2, 3]]
    part.part(1, 3).write(np.array([[7, 8, 9]]))
    assert whole.read().tolist() == [[7, 8, 9], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    with pytest.raises(ValueError, match=r"at most the buffer's \[4, 3\], found \[5, 3\]"):
        whole.part(5, 3)
    assert whole.part(4, 3).read().shape == (4, 3)
    assert whole.part(2, 2, start=5).read().tolist() == [[5, 6], [7, 8]]
    slots_of(whole, range(1, 3)).write(np.zeros((2, 3), np.int64))
    assert whole.read().tolist() == [[7, 8, 9], [0, 0, 0], [0, 0, 0], [9, 10, 11]]
    assert slots_of(whole, range(1, 2)).part(1, 1).address == whole.address + 3 * 8
    for start in (7, -1):
        with pytest.raises(ValueError, match=rf"at most the buffer's \[4, 3\], found \[2, 3\] after {start} elements"):
            whole.part(2, 3, start=start)


def test_a_program_reads_written_values_and_its_outputs_are_read(device: Device) -> None:
    """Twice, and in a chain, which TensorRT replays as a captured graph."""
    buffers = layout_buffers(device)
    run = device.chain([device.program(names.STEP_PREPARE_TREE).bind(buffers)])
    for past in ([4, 9], [0, 1], [7, 2], [5, 5]):
        buffers[names.HOST_PARENTS].write(np.array([[-1, 0, 1], [-1, 0, 0]]))
        buffers[names.CACHE_LEN].write(np.array(past))
        run()
        positions = np.array([[0, 1, 2], [0, 1, 1]]) + np.array(past)[:, None]
        np.testing.assert_array_equal(buffers[names.POSITIONS].read(), positions)
        assert buffers[names.TREE_MASK].read()[1, 2].tolist() == [True, False, True]


def test_host_inputs_send_filled_values_and_host_outputs_fetch(device: Device) -> None:
    """Repeatedly, with one copy each way. Fields that are not filled again keep their values."""
    host_inputs = device.host_inputs(cache_len=(2,), parents=(2, 3))
    sent = {names.CACHE_LEN: host_inputs.buffers["cache_len"], names.HOST_PARENTS: host_inputs.buffers["parents"]}
    buffers = {**layout_buffers(device), **sent}
    host_outputs = device.host_outputs(buffers[names.POSITIONS])
    layout = device.program(names.STEP_PREPARE_TREE).bind(buffers)
    work = device.chain([host_inputs.send, layout, host_outputs.fetch])
    host_inputs.open()["parents"][:] = [[-1, 0, 1], [-1, 0, 0]]
    for past in ([4, 9], [0, 1], [7, 2], [5, 5]):
        host_inputs.open()["cache_len"][:] = past
        work()
        device.wait()
        positions = np.array([[0, 1, 2], [0, 1, 1]]) + np.array(past)[:, None]
        np.testing.assert_array_equal(host_outputs.values, positions)
        assert work.seconds() > 0


def test_values_of_a_running_copy_are_not_overwritten(device: Device) -> None:
    """Filling again before the device has read the first values waits for it."""
    host_inputs, seen = device.host_inputs(cache_len=(2,)), []
    buffers = {**layout_buffers(device, nodes=1), names.CACHE_LEN: host_inputs.buffers["cache_len"]}
    host_outputs_made = [device.host_outputs(buffers[names.POSITIONS]) for _ in range(3)]
    layout = device.program(names.STEP_PREPARE_TREE).bind(buffers)
    chains = [device.chain([host_inputs.send, layout, host_outputs.fetch]) for host_outputs in host_outputs_made]
    for turn in range(3):  # in order, captured, replayed
        for place, chain in enumerate(chains):
            values = host_inputs.open()
            if place == 1:
                device.wait()  # which knows only values sent before it
            values["cache_len"][:] = [10 * turn + place, 1]
            chain()
        device.wait()
        seen += [host_outputs.values[0, 0] for host_outputs in host_outputs_made]
    assert seen == [0, 1, 2, 10, 11, 12, 20, 21, 22]


def test_a_chain_is_its_runs_in_order(device: Device) -> None:
    done: list[int] = []
    chain = device.chain([lambda: done.append(1), lambda: done.append(2)])
    for _ in range(3):
        chain()
    device.chain([])()
    assert done == [1, 2] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda device, buffers: buffers.pop(names.CACHE_LEN), "missing or unknown: cache_len"),
        (lambda device, buffers: buffers.update(more=device.empty("int64", 1)), "missing or unknown: more"),
        (lambda device, buffers: buffers.update(cache_len=device.empty("int32", 2)), r"expected int64\['B'\]"),
        (lambda device, buffers: buffers.update(cache_len=device.empty("int64", 2, 1)), "cache_len: expected"),
        (lambda device, buffers: buffers.update(cache_len=device.empty("int64", 3)), "'B': 2.*found int64.*3"),
        (lambda device, buffers: buffers.update(tree_mask=device.empty("bool", 2, 3, 4)), "tree_mask: expected"),
    ],
)
def test_bindings_that_do_not_fit_are_named(device: Device, change: Change, message: str) -> None:
    buffers = layout_buffers(device)
    change(device, buffers)
    with pytest.raises(ValueError, match=message):
        device.program(names.STEP_PREPARE_TREE).bind(buffers)


@pytest.mark.parametrize("graph", [names.STEP_COMPACT_KV, names.STEP_COPY_SLOT])
def test_an_in_place_update_uses_one_buffer(device: Device, graph: str) -> None:
    buffers = state_buffers(device, graph)
    device.program(graph).bind(buffers)
    other = names.present(names.key_cache(0))
    with pytest.raises(ValueError, match=f"{other}: expected the buffer of kv.0.key"):
        device.program(graph).bind({**buffers, other: device.empty("float32", *buffers[other].shape)})


def state_buffers(device: Device, graph: str, slots: int = 2, nodes: int = 4) -> dict[str, Buffer]:
    """Buffers of a graph over KV rows with distinct values."""
    buffers = buffers_of(device, device.program(graph), B=slots, T=nodes, C=16)
    for buffer in buffers.values():
        if buffer.dtype == "float32":
            buffer.write(np.arange(np.prod(buffer.shape), dtype=np.float32).reshape(buffer.shape))
    host_inputs = device.host_inputs(**{names.SOURCE_SLOT: (1,), names.TARGET_SLOT: (1,)})  # the host says which
    return {**buffers, **(host_inputs.buffers if graph == names.STEP_COPY_SLOT else {})}


def test_a_slot_moves_to_the_slot_of_the_host(device: Device) -> None:
    """The latest slots count, though earlier copies may still run."""
    buffers = state_buffers(device, names.STEP_COPY_SLOT, slots=4)
    before = buffers["kv.0.key"].read()
    state = {name: buffer for name, buffer in buffers.items() if name in ("kv.0.key", "kv.0.value")}
    move = slot_copy(device, names.STEP_COPY_SLOT, state)
    for source, target in ((3, 0), (2, 1)):
        move(source, target, 1)
    np.testing.assert_array_equal(buffers["kv.0.key"].read(), before[[3, 2, 2, 3]])
    np.testing.assert_array_equal(buffers["kv.0.value"].read(), before[[3, 2, 2, 3]])
