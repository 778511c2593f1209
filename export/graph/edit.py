"""Edits that several graph passes make: constants, initializers, and types of new values."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


def constant_ints(model: ir.Model, numbers: Sequence[int]) -> ir.Value:
    """Return an int64 vector among the initializers, one for equal vectors."""
    name = "ints." + "_".join(map(str, numbers))
    if name not in model.graph.initializers:
        value = ir.Value(name=name, shape=ir.Shape([len(numbers)]), type=ir.TensorType(ir.DataType.INT64))
        value.const_value = ir.tensor(numbers, ir.DataType.INT64, name=name)
        model.graph.register_initializer(value)
    return model.graph.initializers[name]


def unplaced(model: ir.Model, name: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
    """Return the graph's initializer of this name. `weights.place` gives it its bytes."""
    if name not in model.graph.initializers:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        value.const_value = ir.ExternalTensor("unplaced", 0, 0, dtype, shape=ir.Shape(shape), name=name)
        model.graph.register_initializer(value)
    return model.graph.initializers[name]


def typed(value: ir.Value, like: ir.Value, size: int) -> ir.Value:
    """Give a value the type of another, and its shape with another last size. Returns the value."""
    value.type = like.type
    if like.shape is not None:
        value.shape = ir.Shape([*list(like.shape)[:-1], size])
    return value
