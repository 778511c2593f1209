"""The operators for ONNX Runtime's CPU provider: products of weights with 4 and 8 bits, attention over trees, gates.

A session that registers the library runs `com.microsoft.MatMulNBits` with it, in graphs that also run without it. For
the attention, bundles have graphs of their own (`redraft.names.VERIFIER_OPERATORS`) beside those for ONNX Runtime.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from redraft.errors import KernelError
from redraft.names import CPU_TREE_ATTENTION, PRODUCTS, SILU_GATE
from redraft.plugins.library import BUILD

OPERATORS_VARIABLE = "REDRAFT_OPERATORS"
OFF = "off"
OPERATORS_LIBRARY = "libredraft_operators.so"
PACKAGED = Path(__file__).parent
"""Folder of a wheel's library."""
OPERATORS_HINT = "run `make operators` in a checkout, or reinstall the package where g++ is"
OPERATOR_NAMES = (*PRODUCTS, CPU_TREE_ATTENTION, SILU_GATE)
"""Types of the nodes that it computes."""
_INTERFACES = 2, 4
"""Numbers of the C entries of products, and of attention and gates."""
PLAIN = "scalar"
"""The kernels' name for plain C++, which is slower than ONNX Runtime's own."""


@dataclass(frozen=True)
class Operators:
    """A library that exists. digest: SHA-256 of its file. instruction_set: the one that its kernels use here."""

    path: Path
    digest: str
    instruction_set: str

    @property
    def identity(self) -> str:
        """Names the library and the instruction set, for figures and fingerprints."""
        return f"{self.digest[:16]} {self.instruction_set}"


def missing_operators(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason why ONNX Runtime's own kernels run, or None if the library exists."""
    if environment.get(OPERATORS_VARIABLE) == OFF:
        return f"{OPERATORS_VARIABLE}={OFF}"
    path = _library_path(environment)
    return None if path.exists() else f"no operators at {path}"


def find_operators(environment: Mapping[str, str] = os.environ) -> Operators | None:
    """Return the library that REDRAFT_OPERATORS names, else that of the wheel, else that of build/plugins.

    A wheel has its library in this package, where a source tree has none. So each runs the one it was built with.
    Returns None if the variable is `off`, if none was built, and if this processor has none of its instruction sets. A
    process keeps its first answer, so that its engines compute alike.
    Raises KernelError if the library that the variable names is missing, and for one that does not load.
    """
    if environment.get(OPERATORS_VARIABLE) == OFF:
        return None
    found = _open(_library_path(environment))
    if found is None and environment.get(OPERATORS_VARIABLE):
        reason = missing_operators(environment) or "no instruction set for the named operators on this processor"
        raise KernelError(reason, f"name another library in {OPERATORS_VARIABLE}, or `{OFF}`")
    return found


@cache
def _open(path: Path) -> Operators | None:
    """Load the library and read its file. Returns None if there is none, or if it would run plain C++ here."""
    if not path.exists():
        return None
    hint = f"{OPERATORS_HINT}, or set {OPERATORS_VARIABLE}={OFF}"
    try:
        library = ctypes.CDLL(str(path))
        name = library.redraft_products_isa
        library.RegisterCustomOps  # noqa: B018 - raises if it is not there
        interfaces = library.redraft_products_abi(), library.redraft_attention_abi()
    except OSError as error:
        raise KernelError(f"{path} does not load: {error}", hint) from error
    except AttributeError:
        raise KernelError(f"{path} is not a library of redraft's operators, or an older one", hint) from None
    if interfaces != _INTERFACES:
        raise KernelError(f"{path}: expected operators of interfaces {_INTERFACES}, found {interfaces}", hint)
    name.restype = ctypes.c_char_p
    instruction_set = name().decode()
    if instruction_set == PLAIN:
        return None
    return Operators(path, hashlib.sha256(path.read_bytes()).hexdigest(), instruction_set)


def _library_path(environment: Mapping[str, str]) -> Path:
    packaged = PACKAGED / OPERATORS_LIBRARY
    found = packaged if packaged.exists() else BUILD / OPERATORS_LIBRARY
    return Path(environment.get(OPERATORS_VARIABLE) or found).resolve()
