"""Deployed modules import without the optional extras, and the command line starts without heavy libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXTRAS = ("torch", "transformers", "safetensors", "onnx", "onnxscript", "onnx_ir", "ml_dtypes", "onnxruntime_genai",
          "llama_cpp", "xllamacpp", "openvino_genai", "matplotlib", "nvtx", "optimum", "polygraphy",
          "cuda", "fastapi", "starlette", "uvicorn", "sse_starlette", "anyio",
          "prometheus_client", "ray")  # fmt: skip
_TENSORRT = ("expand", "memory", "native", "operators", "prepare", "stage")
BUILD_TIME = ("redraft.engines.lowering", *(f"redraft.engines.tensorrt.{name}" for name in _TENSORRT))
"""Modules that write graphs when a bundle is built; nothing deployed may need them."""
WITH_EXTRAS = ("redraft.runtime.server", "redraft.runtime.replicas.ray_serve")
"""What needs the extras `serve` and `ray`; no other module imports it."""
HEAVY = (*EXTRAS, "onnxruntime", "numpy", "tokenizers")

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Block())
"""


def run_without(blocked: tuple[str, ...], program: str) -> subprocess.CompletedProcess[str]:
    """Run `program` in a fresh interpreter in which the modules `blocked` cannot be imported."""
    source = BLOCK.format(blocked=blocked) + program
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)


def deployed(root: Path) -> list[str]:
    """Modules of redraft/, engines/ and runtime/, without those that only building needs."""
    names = []
    for folder, package in (("redraft", "redraft"), ("engines", "redraft.engines"), ("runtime", "redraft.runtime")):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            names.append(".".join((package, *(part for part in parts if part != "__init__"))))
    return [
        name for name in names if not any(f"{name}.".startswith(f"{built}.") for built in (*BUILD_TIME, *WITH_EXTRAS))
    ]


def test_deployed_modules_import_without_extras(root: Path) -> None:
    program = f"import importlib\nfor name in {deployed(root)!r}: importlib.import_module(name)"
    result = run_without(EXTRAS, program)
    assert result.returncode == 0, result.stderr


def test_help_needs_no_heavy_library() -> None:
    program = """
import sys
from redraft.cli.main import main, run
for command in ["build"], ["generate"], ["serve"], ["bench"], ["profile"]:
    assert run([*command, "--help"]) == 0
sys.argv = ["redraft", "--help"]
main()
"""
    result = run_without(HEAVY, program)
    assert result.returncode == 0, result.stderr
    for command in ("build", "generate", "serve", "bench", "profile", "[OPTIONS] COMMAND"):
        assert f"Usage: redraft {command}" in result.stdout
