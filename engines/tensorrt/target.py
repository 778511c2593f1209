"""TensorRT's two products, the version and GPU that engines are for, and the tools that build them on this machine.

An engine runs with no other version or GPU.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from redraft.config import NATIVE_RELEASES, BuildConfig, Precision
from redraft.engines.gpu import Gpu, find_gpu
from redraft.engines.tensorrt.plugin import LOG_PREFIX, Plugin, find_plugin
from redraft.engines.tensorrt_records import TensorRtRecord
from redraft.errors import BackendError, UsageError


@dataclass(frozen=True)
class Product:
    """One product.

    backend:  its name in options and manifests.     title: its name in messages.
    module:   its Python package.                    install: how to get it.
    oldest, newest_major: versions that are supported.
    ahead:    its engines are for a compute capability and are built without a GPU. What depends on the GPU is compiled
              when an engine first runs, and kept in a runtime cache. It takes no plugins and no timing cache.
    """

    backend: str
    title: str
    module: str
    oldest: tuple[int, int]
    newest_major: int
    install: str
    ahead: bool = False


PACKAGE = "tensorrt>=10.9,<12"
"""TensorRT's package for pip."""
TENSORRT = Product(
    "tensorrt", "TensorRT", "tensorrt", (10, 9), 11, f"run `pip install '{PACKAGE}'`, or use NVIDIA's container"
)
RTX = Product(
    "tensorrt-rtx", "TensorRT for RTX", "tensorrt_rtx_bindings", (1, 7), 1, "run `pip install 'redraft[tensorrt-rtx]'`",
    ahead=True,
)  # fmt: skip
PRODUCTS: Mapping[str, Product] = {product.backend: product for product in (TENSORRT, RTX)}

UNKNOWN_REASON = "no reason given"
"""The reason in an error if TensorRT logged none."""
_LOG = logging.getLogger("redraft.tensorrt")
_LOGGERS: dict[Any, Any] = {}
_INSTEAD = "build with --backend onnxruntime (BACKEND=onnxruntime)"

FP8_CAPABILITY = (8, 9)
NATIVE_FROM = (10, 15)
STALE_RELEASES = ((11, 1), (11, 2))
"""Releases with attention layers that were seen to read rows of a KV buffer past `kv_len`."""


@dataclass(frozen=True)
class Target:
    """`version` is the product's, in full. Engines that are built ahead have a GPU of unknown name and memory."""

    version: str
    gpu: Gpu
    product: Product = TENSORRT

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version: from 10 on of TensorRT, 1 of TensorRT for RTX."""
        return parse_version(self.version)

    @property
    def compute_capability(self) -> str:
        """Like 9.0."""
        return ".".join(map(str, self.gpu.compute_capability))


def parse_version(text: str) -> tuple[int, int]:
    """Return (10, 13) of 10.13.3.9. Raises BackendError for a text that does not begin like a version."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if not match:
        raise BackendError(f"TensorRT has the unknown version {text!r}", TENSORRT.install)
    return int(match[1]), int(match[2])


def find_target(
    gpu: Callable[[], Gpu] = find_gpu, load: Callable[[str], ModuleType] = importlib.import_module,
    product: Product = TENSORRT, capability: str = "",
) -> Target:  # fmt: skip
    """Return the GPU and TensorRT. Raises BackendError if one is missing or the version is not supported.

    capability: compute capability that a product builds ahead for, such as 8.9; "" is that of the GPU here.
    """
    found = _ahead(gpu, capability) if product.ahead else gpu()
    tensorrt = import_tensorrt(load, product)
    version = str(tensorrt.__version__)
    release = parse_version(version)
    if release < product.oldest or release[0] > product.newest_major:
        oldest = ".".join(map(str, product.oldest))
        raise BackendError(
            f"expected {product.title} {oldest} to {product.newest_major}.x, found {version}", product.install
        )
    target = Target(version, found, product)
    if product.ahead and (known := capabilities(tensorrt)) and target.compute_capability not in known:
        raise BackendError(
            f"{product.title} {version} builds for no GPU of compute capability {target.compute_capability}",
            f"give --compute-capability {', '.join(known)}",
        )
    return target


def _ahead(gpu: Callable[[], Gpu], capability: str) -> Gpu:
    """Return any GPU of a compute capability, or of that of the GPU here."""
    if not capability:
        try:
            found = gpu().compute_capability
        except BackendError as error:
            raise BackendError(
                f"no GPU here to build for: {error.message}", "name its kind, such as --compute-capability 8.9"
            ) from None
    elif match := re.fullmatch(r"(\d+)\.(\d+)", capability):
        found = int(match[1]), int(match[2])
    else:
        raise UsageError(f"--compute-capability {capability!r}: expected a number such as 8.9")
    return Gpu("any GPU", found, 0, 0)


def capabilities(tensorrt: Any) -> list[str]:
    """Return the compute capabilities that a product builds ahead for, oldest first, such as 8.9."""
    numbers = [re.fullmatch(r"SM(\d+)(\d)", name) for name in tensorrt.ComputeCapability.__members__]
    return [f"{match[1]}.{match[2]}" for match in numbers if match]


def check_precision(precision: Precision, gpu: Gpu) -> None:
    """Raise BackendError if a GPU has no kernels for this precision, before anything is built."""
    if precision == "fp8" and gpu.compute_capability < FP8_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (FP8_CAPABILITY, gpu.compute_capability))
        raise BackendError(
            f"fp8 weights need a GPU of compute capability {needed} or newer, found {gpu.name} of {found}",
            "build with --precision int8, or for a newer GPU",
        )


def check_native(release: tuple[int, int]) -> None:
    """Raise BackendError if this TensorRT's own layers do not compute tree attention (NATIVE_RELEASES)."""
    if release < TENSORRT.oldest:
        return  # TensorRT for RTX has both
    version = ".".join(map(str, release))
    hint = f"build with --attention plugin, or use {NATIVE_RELEASES}"
    if release < NATIVE_FROM:
        raise BackendError(f"TensorRT {version} has no KV update of its own", hint)
    if release in STALE_RELEASES:
        raise BackendError(f"TensorRT {version} may read rows of KV buffers that are not live", hint)


def import_tensorrt(load: Callable[[str], ModuleType] = importlib.import_module, product: Product = TENSORRT) -> Any:
    """Return the product's Python package. Raises BackendError if it or a library of it is missing."""
    try:
        return load(product.module)
    except ModuleNotFoundError as error:
        raise BackendError(
            f"backend {product.backend} needs the package {error.name}, which is not installed", product.install
        ) from None
    except (ImportError, OSError) as error:
        raise BackendError(f"{product.title} does not load: {error}", product.install) from None


def product_logger(tensorrt: Any) -> Any:
    """Return the logger of a product, which sends lines to Python's logging and stores the latest in `last_error`.

    One logger serves the process, since TensorRT keeps the first one for everything after it. Calls report only that
    they failed. TensorRT's warnings are logged as information, and our plugin's one warning as a warning.
    """
    if tensorrt in _LOGGERS:
        return _LOGGERS[tensorrt]
    levels = {tensorrt.ILogger.VERBOSE: logging.DEBUG, tensorrt.ILogger.INFO: logging.DEBUG,
              tensorrt.ILogger.WARNING: logging.INFO}  # fmt: skip

    def begin(logger: Any) -> None:
        tensorrt.ILogger.__init__(logger)

    def log(logger: Any, severity: Any, message: str) -> None:
        level = levels.get(severity, logging.WARNING)
        if level is logging.WARNING:
            logger.last_error = " ".join(message.split())
        if severity == tensorrt.ILogger.WARNING and message.startswith(LOG_PREFIX):
            level = logging.WARNING
        _LOG.log(level, "%s", message)

    kind = type("Logger", (tensorrt.ILogger,), {"__init__": begin, "log": log, "last_error": ""})
    return _LOGGERS.setdefault(tensorrt, kind())


def check_same(record: TensorRtRecord, here: Target, rebuild: str) -> None:
    """Raise BackendError if engines were built for another TensorRT or GPU than `here`. `rebuild` is the hint."""
    built = (record.version, record.gpu, record.compute_capability)
    if built != (here.version, here.gpu.name, here.compute_capability):
        title = here.product.title
        raise BackendError(
            f"the engines are for {title} {built[0]} on {built[1]} ({built[2]}), "
            f"found {title} {here.version} on {here.gpu.name} ({here.compute_capability})",
            rebuild,
        )


@dataclass(frozen=True)
class Tools:
    """The tools of a build: with the graphs, they decide its result."""

    target: Target
    plugin: Plugin | None

    def digests(self) -> dict[str, str]:
        """Parts of a bundle's build key."""
        gpu = f"{self.target.gpu.name} {self.target.compute_capability}"
        return {"tensorrt": self.target.version, "gpu": gpu, "plugin": self.plugin.digest if self.plugin else ""}


def find_tools(config: BuildConfig) -> Tools:
    """Return GPU, TensorRT and plugin. Raises BackendError if one is missing or does not support the build."""
    product = PRODUCTS[config.backend]
    target = find_target(product=product, capability=config.tensorrt.compute_capability)
    check_precision(config.precision, target.gpu)
    if config.tensorrt.attention == "plugin" and not product.ahead:
        return Tools(target, find_plugin(target.release[0]))
    check_native(target.release)
    return Tools(target, None)


def check_buildable(config: BuildConfig) -> Tools | None:
    """Return the tools of a build for TensorRT, None for another backend.

    Raises BackendError naming the package to install if this machine cannot build this configuration.
    """
    if not config.for_tensorrt:
        return None
    product = PRODUCTS[config.backend]
    if find_spec(product.module) is None:
        raise BackendError(
            f"backend {product.backend} needs {product.title}, which is not installed",
            f"{product.install}, or {_INSTEAD}",
        )
    return find_tools(config)
