"""Quiet exports."""

from __future__ import annotations

import logging
import warnings


def quiet_export() -> None:
    """Silence what tracing says about itself; errors still come."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
