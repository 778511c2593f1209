"""A Hugging Face checkpoint to an ONNX graph and its weights; the home of torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def quiet_export() -> None:
    """Silence warnings and logs of tracing. Errors are still raised."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the context, transformers logs only errors and shows no progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
