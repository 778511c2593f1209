"""The machine and the libraries of a figure."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from redraft.cpus import default_threads
from redraft.packages import package_version

LIBRARIES = ("redraft", "numpy", "onnxruntime", "onnxruntime-genai", "openvino-genai", "llama-cpp-python", "torch",
             "transformers", "tokenizers")  # fmt: skip
SETTLE_SECONDS = 0.02
"""Wait before timed calls, until the threads of the previous session stop spinning."""
_GPU_FIELDS = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")


def environment(threads: int | None = None) -> dict[str, Any]:
    """Return Python, library versions, processor, usable and used threads: a JSON object."""
    versions = {name: package_version(name) for name in LIBRARIES}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor_name(),
        "usable_threads": usable_threads(),
        "threads": threads,
        "libraries": {name: version for name, version in versions.items() if version is not None},
    }


def execution_providers() -> list[str]:
    """Return the devices that the installed ONNX Runtime was built for. Raises ImportError if it cannot be loaded."""
    import onnxruntime

    return list(onnxruntime.get_available_providers())


def usable_threads() -> int:
    """Return the default number of threads of this process."""
    return default_threads().count


def cpu_flags() -> frozenset[str]:
    """Return the instruction-set flags that Linux reports; empty on other systems."""
    return frozenset(_cpuinfo("flags", "Features").split())


def processor_name() -> str:
    """Return the marketing name of the processor, or its architecture."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(*keys: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    values = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in values if key.strip() in keys), "")


def nvidia_smi() -> dict[str, str]:
    """Return driver, highest clocks and power limit of the GPU by field; empty if nvidia-smi is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    values = done.stdout.splitlines()[0].split(", ") if done.returncode == 0 and done.stdout else []
    return dict(zip(_GPU_FIELDS, values, strict=False))
