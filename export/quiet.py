"""Silences the libraries that exports use."""

from __future__ import annotations

import logging
import warnings


def quiet_export() -> None:
    """Silence warnings and logs of tracing. Errors are still raised."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
