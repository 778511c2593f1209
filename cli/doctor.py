"""`redraft doctor`: checks that this machine can run redraft, and prints a hint for each missing part."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.version import Version

from redraft.bench.environment import cpu_flags, execution_providers, processor_name
from redraft.cli.console import Finding, print_json
from redraft.cli.options import Verify
from redraft.cpus import default_threads
from redraft.errors import BackendError, KernelError
from redraft.packages import GPU_BUILDS, gpu_requirement, package_version
from redraft.plugins.operators import OFF, OPERATORS_HINT, find_operators, missing_operators
from redraft.user_cache import user_cache

MARKS = {"ok": "ok", "absent": "--", "warning": "!!", "broken": "XX"}
OLDEST_PYTHON = (3, 11)
NEEDED_DISK_BYTES = 2 << 30
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_vnni", "amx_tile", "asimd", "sve")


def doctor(
    engines: Annotated[
        Path | None,
        typer.Option(help="Also check a bundle: exactness of its texts on this machine, and costs of verification."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences at once, with --engines.")] = 1,
    verify: Verify = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check Python, packages, processor, memory, disk and engine libraries. Exit 1 when the CPU path cannot work."""
    findings = list(examine())
    works = all(finding.status != "broken" for finding in findings)
    bundle = None
    if engines is not None:
        from redraft.cli.doctor_engines import examine_engines

        bundle = examine_engines(engines, max_num_seqs, verify)
        findings.append(bundle.exactness)
    if as_json:
        costs = {} if bundle is None else {"costs_ms": bundle.costs_ms}
        print_json({"cpu_path_works": works, "findings": [asdict(finding) for finding in findings], **costs})
    else:
        for finding in findings:
            hint = f"; {finding.hint}" if finding.hint else ""
            typer.echo(f"{MARKS[finding.status]}  {finding.name:22s} {finding.found}{hint}")
        if bundle is not None:
            typer.echo(bundle.table())
        typer.echo("the CPU path works" if works else "the CPU path cannot work: fix the lines marked XX")
    raise typer.Exit(0 if works else 1)


def examine() -> Iterator[Finding]:
    """Yield every finding, first those that the CPU path needs."""
    yield _python()
    yield from _packages()
    yield from _both_builds()
    yield _providers()
    yield _kernels()
    yield from _machine()
    yield from _accelerators()


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", "broken", found, "run `make install PYTHON=python3.12`")
    return Finding("python", "ok", found)


def _packages() -> Iterator[Finding]:
    """Compare pinned requirements with installed packages. Packages of extras may be absent."""
    for text in sorted(metadata.requires("redraft") or ()):
        requirement = Requirement(text)
        name, expected = requirement.name, str(requirement.specifier).removeprefix("==")
        extra = text.partition("extra ==")[2].strip(" \"'")
        if name == "redraft":
            continue
        install = f"run `pip install 'redraft[{extra}]'`" if extra else "run `make install`"
        found = _package_version(name)
        instead = GPU_BUILDS.get(name, "")
        if found is None and instead and (found := _package_version(instead)):
            name, install = instead, f"run `pip install '{gpu_requirement(name, expected)}'`"
        if found is None:
            yield Finding(name, "absent" if extra else "broken", f"not installed, expected {expected}", install)
        elif requirement.specifier.contains(found, prereleases=True):
            yield Finding(name, "ok", found)
        else:
            yield Finding(name, "warning", found, f"expected {expected}; {install}")


def _both_builds() -> Iterator[Finding]:
    """Warn if a build for the CPU and one for a GPU are installed over each other."""
    for name, build in GPU_BUILDS.items():
        versions = _package_version(name), _package_version(build)
        if None not in versions:
            found = f"{name} {versions[0]} and {build} {versions[1]} are both installed, over each other"
            hint = (
                f"run `pip uninstall -y {name} {build}`, then `pip install '{gpu_requirement(name, versions[0])}'` "
                f"for a GPU, else `pip install {name}=={versions[0]}`"
            )
            yield Finding(f"{name} builds", "warning", found, hint)


def _providers() -> Finding:
    try:
        providers = execution_providers()
    except (ImportError, AttributeError) as error:  # uninstalling one of two builds leaves an empty package
        return Finding("onnxruntime providers", "broken", f"cannot be imported ({error})", "run `make install`")
    works = "CPUExecutionProvider" in providers
    return Finding("onnxruntime providers", "ok" if works else "broken", ", ".join(providers))


def _kernels() -> Finding:
    """Return the kernels of attention and of int8 and int4 products on the CPU, after loading them."""
    name = "kernels on CPUs"
    try:
        from redraft.engines.onnxruntime_backend import register_operators, session_options

        operators = find_operators()
        if operators is None:
            reason = missing_operators() or ""
            hint = None if reason.endswith(f"={OFF}") else OPERATORS_HINT
            return Finding(name, "absent", f"ONNX Runtime's kernels: {reason}", hint)
        register_operators(session_options(1, "error"), operators)
    except KernelError as error:
        return Finding(name, "warning", error.message, error.hint)
    except (ImportError, AttributeError) as error:
        return Finding(name, "absent", f"cannot be imported ({error})")
    return Finding(name, "ok", f"redraft's kernels, {operators.instruction_set}, in {operators.path}")


def _machine() -> Iterator[Finding]:
    from redraft.engines.host_memory import available_bytes

    threads = default_threads()
    yield Finding("processor", "ok", processor_name())
    yield Finding("threads", "ok", f"{threads.count} by default: {threads.reason}")
    flags = [flag for flag in VECTOR_FLAGS if flag in cpu_flags()]
    known = bool(flags) or not cpu_flags()
    yield Finding("vector instructions", "ok" if known else "warning", ", ".join(flags) or "unknown")
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        left = available_bytes()
        words = "" if left is None else f", {left / (1 << 30):.1f} GiB available to this process"
        yield Finding("memory", "ok", f"{memory_bytes / (1 << 30):.1f} GiB{words}")
    free = shutil.disk_usage(Path.cwd()).free
    enough = free >= NEEDED_DISK_BYTES
    yield Finding("disk", "ok" if enough else "warning", f"{free / (1 << 30):.1f} GiB free in {Path.cwd()}",
                  None if enough else "free some, or build with -o on another disk")  # fmt: skip
    yield _cache_folder()
    yield _engine_cache()


def _cache_folder() -> Finding:
    folder = user_cache()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(parent, os.W_OK | os.X_OK):  # a file, as of a user without a home, is no folder
        return Finding("cache folder", "ok", f"{folder}")
    return Finding("cache folder", "warning", f"{folder} is not writable", "set XDG_CACHE_HOME to a folder that is")


def _engine_cache() -> Finding:
    """Return the size of the cache of TensorRT engines."""
    from redraft.engines.tensorrt.engine_cache import cache_folder, engine_count, limit_bytes, own_bytes

    folder = cache_folder()
    if not folder.is_dir():
        return Finding("engine cache", "ok", f"none in {folder}")
    found = (
        f"{engine_count(folder)} engines, {own_bytes(folder) / 1e9:.1f} GB besides those of bundles, "
        f"at most {limit_bytes(folder) / 1e9:.1f} GB, in {folder}"
    )
    return Finding("engine cache", "ok", found)


def _accelerators() -> Iterator[Finding]:
    """Yield the GPU, TensorRT and its plugin; the CPU path needs none. TensorRT is not loaded without a driver."""
    from redraft.engines.gpu import cuda_version, find_gpu
    from redraft.engines.tensorrt.plugin import FOLDER, library_name
    from redraft.engines.tensorrt.target import PACKAGE, find_target

    backends, packages = list[str](), None
    try:
        gpu = find_gpu()
    except BackendError as error:
        yield Finding("GPU", "absent", error.message, error.hint)
        yield Finding("TensorRT", "absent", _package_version("tensorrt") or "not installed")
    else:
        capability, gib = ".".join(map(str, gpu.compute_capability)), 1 << 30
        memory = f"{gpu.free_bytes / gib:.1f} of {gpu.total_bytes / gib:.1f} GiB free"
        yield Finding("GPU", "ok", f"{gpu.name}, compute capability {capability}, {memory}")
        yield _driver(cuda_version(), _package_version("cuda-python"))
        onnxruntime = _onnxruntime_on_cuda()
        yield onnxruntime
        backends = ["ONNX Runtime"] if onnxruntime.status == "ok" else []
        try:
            yield Finding("TensorRT", "ok", find_target(lambda: gpu).version)
            backends.append("TensorRT")
        except BackendError as error:
            yield Finding("TensorRT", "absent", error.message, error.hint)
        if not backends:
            gpu_build = gpu_requirement("onnxruntime", package_version("onnxruntime"))
            packages = f"install {gpu_build} in place of onnxruntime, or {PACKAGE}"
    yield Finding("device cpu", "ok", "ONNX Runtime")
    yield Finding("device cuda", "ok" if backends else "absent", ", ".join(backends) or "nothing runs on a GPU here",
                  packages)  # fmt: skip
    plugins = sorted(path.name for path in FOLDER.glob(library_name("*")))
    yield Finding("TensorRT plugin", "ok" if plugins else "absent", ", ".join(plugins) or f"none in {FOLDER}",
                  None if plugins else "run `make plugins TENSORRT_ROOT=dir`")  # fmt: skip


def _onnxruntime_on_cuda() -> Finding:
    """Check that ONNX Runtime's provider for CUDA starts, with the libraries that it needs."""
    name = "ONNX Runtime on CUDA"
    try:
        from redraft.engines.onnxruntime_backend import CUDA, start_provider

        start_provider(CUDA)
    except BackendError as error:
        return Finding(name, "absent", error.message, error.hint)
    except (ImportError, AttributeError) as error:
        return Finding(name, "absent", f"cannot be imported ({error})")
    return Finding(name, "ok", f"{CUDA} starts")


def _driver(cuda: tuple[int, int], bindings: str | None) -> Finding:
    """Check that the driver's CUDA runs the installed cuda-python."""
    found = f"CUDA {cuda[0]}.{cuda[1]}"
    if bindings is None or Version(bindings).major <= cuda[0]:
        return Finding("driver", "ok", found)
    hint = f"run `pip install 'cuda-python<{cuda[0] + 1}'`, or install a newer driver"
    return Finding("driver", "warning", f"{found}, which does not run cuda-python {bindings}", hint)


def _package_version(name: str) -> str | None:
    """Return the version of this package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
