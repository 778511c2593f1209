"""Load the plugin into the registry of TensorRT's lean runtime: `python registry.py LIBRARY` prints one JSON object.

Runs in an interpreter with `tensorrt_lean`, and uses only the standard library, since that interpreter may lack others.
"""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any

import tensorrt_lean as trt

GOOD = {"scale": 0.125, "softcap": 30.0, "window": 6, "q_heads": 4, "kv_heads": 2}
IN_PLAN = {**GOOD, "multiprocessors": 132, "compute_capability": 90}


def create(creator: Any, values: dict[str, float], phase: Any, integer: str = "i") -> Any:
    """Return a plugin from fields with integers of the array type `integer`, or None."""
    kinds = {"f": trt.PluginFieldType.FLOAT32, "i": trt.PluginFieldType.INT32, "q": trt.PluginFieldType.INT64}
    codes = ["f" if isinstance(value, float) else integer for value in values.values()]
    # fields hold only pointers to these arrays
    arrays = [array(code, [value]) for code, value in zip(codes, values.values(), strict=True)]
    fields = [trt.PluginField(name, data, kinds[data.typecode]) for name, data in zip(values, arrays, strict=True)]
    return creator.create_plugin("node", trt.PluginFieldCollection(fields), phase)


def main(library: str) -> dict[str, Any]:
    build, run = trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME
    registry = trt.get_plugin_registry()
    handle = registry.load_library(library)
    found: dict[str, Any] = {"version": trt.__version__, "loaded": handle is not None}
    creator = registry.get_creator("TreeAttention", "1", "")
    found["registered"] = creator is not None
    if creator is None:
        return found
    plugin = create(creator, GOOD, build)
    found["fields"] = [field.name for field in creator.field_names]
    found["capabilities"] = [
        plugin.get_capability_interface(kind).interface_info.kind
        for kind in (trt.PluginCapabilityType.CORE, trt.PluginCapabilityType.BUILD, trt.PluginCapabilityType.RUNTIME)
    ]
    found["long_integers"] = create(creator, GOOD, build, "q") is not None
    found["from_plan"] = create(creator, IN_PLAN, run) is not None
    found["plan_without_device"] = create(creator, GOOD, run) is not None
    found["three_kv_heads"] = create(creator, {**GOOD, "kv_heads": 3}, build) is not None
    del plugin
    registry.deregister_library(handle)
    found["left"] = registry.get_creator("TreeAttention", "1", "") is not None
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
