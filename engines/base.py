"""What the runtime sees of an engine, whichever backend runs it.

An engine is opened once; persistent buffers (KV) are bound once by name; a `Call` is one shape of the graph with its
own input and output arrays, made once a shape and reused, so that a step fills arrays, runs and reads arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from redraft.names import TensorSpec

Array = NDArray[Any]


class Call(Protocol):
    """One prepared shape of a graph. The arrays are owned by the call and overwritten by every run."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]

    def run(self) -> None:
        """Execute the graph: reads `inputs` and the bound buffers, writes `outputs` and the bound buffers."""


class Engine(Protocol):
    """A graph of a bundle, loaded and ready."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def bind(self, name: str, buffer: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Bind a persistent C-contiguous array to the input or output `name`, and to outputs that update it in place.

        No copy: the engine reads and writes the array itself. Binding again drops calls prepared so far.
        Raises ValueError on an unknown name or an element type, rank or fixed dimension that does not fit.
        """

    def prepare(self, **sizes: int) -> Call:
        """The call for these sizes of the symbols (`B`, `T`, `R` …), made on first use and kept.

        Symbols of bound buffers (`C`) come from the buffers. Raises ValueError on a missing or unknown symbol.
        """
