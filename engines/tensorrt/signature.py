"""A graph's tensors as TensorRT has them, in a network or an engine, compared with a bundle's manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redraft import names
from redraft.engines.tensorrt.records import Profile
from redraft.names import Dtype, TensorSpec

TYPES: Mapping[Dtype, str] = {
    "int64": "INT64", "int32": "INT32", "bool": "BOOL", "int8": "INT8", "uint8": "UINT8", "float32": "FLOAT",
    "float16": "HALF", "bfloat16": "BF16",
}  # fmt: skip
"""Names of TensorRT's DataType by ours."""


def differences(
    tensorrt: Any, found: Mapping[str, Any], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> Iterator[str]:
    """Yield lines on tensors that differ in name or type. Inputs that nothing reads may be missing.

    found: TensorRT's types by name.
    """
    unknown = dict(found)
    for spec in (*inputs, *outputs):
        if spec.name not in unknown:
            if spec in outputs:
                yield f"expected tensor {spec.name}, found none"
            continue
        dtype = unknown.pop(spec.name)
        if dtype != getattr(tensorrt.DataType, TYPES[spec.dtype]):
            yield f"expected {spec.name} {spec.dtype}, found {dtype}"
    updated = {spec.in_place_of for spec in outputs}
    for name in sorted(unknown):
        if names.linked(name) not in updated:
            yield f"unexpected tensor {name}"


def network_differences(
    tensorrt: Any, network: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec],
    profiles: Sequence[Profile], set_profiles: Sequence[Any],
) -> Iterator[str]:  # fmt: skip
    """Yield lines on a network that differs from the manifest: its types, tensors, fixed sizes, and profiles read back.

    set_profiles: TensorRT's profiles, in the order of `profiles`.
    """
    if not network.get_flag(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED):
        yield "expected a strongly typed network"
    given = [network.get_input(number) for number in range(network.num_inputs)]
    made = [network.get_output(number) for number in range(network.num_outputs)]
    yield from differences(tensorrt, {tensor.name: tensor.dtype for tensor in (*given, *made)}, inputs, outputs)
    specs = {spec.name: spec for spec in inputs}
    for tensor in given:
        spec, shape = specs.get(tensor.name), tuple(tensor.shape)
        if spec is None:
            continue
        pairs = zip(spec.shape, shape, strict=False)
        if len(spec.shape) != len(shape) or any(isinstance(dim, int) and dim != size for dim, size in pairs):
            yield f"expected {spec.name} {list(spec.shape)}, found {list(shape)}"
    sizes = {tensor.name for tensor in given if tensor.is_shape_tensor}
    for profile, kept in zip(profiles, set_profiles, strict=True):
        for name, ranges in profile.inputs.items():
            read = kept.get_shape_input(name) if name in sizes else kept.get_shape(name)
            if [tuple(each) for each in read] != [ranges.min, ranges.opt, ranges.max]:
                yield f"expected {name} {ranges} in profile {profile.name}, found {read}"
