"""A Hugging Face checkpoint to an ONNX graph and its weights; the home of torch."""

from __future__ import annotations

import logging
import warnings


def quiet_export() -> None:
    """Silence warnings and logs of tracing. Errors are still raised."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
