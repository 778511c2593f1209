"""The LangChain example with a running server. Not part of `make test`, which lacks LangChain:

REDRAFT_URL=http://127.0.0.1:8000 REDRAFT_MODEL=NAME python -m pytest --noconftest tests/examples/check_langchain.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/langchain_client.py"


def test_it_prints_a_whole_answer_a_batch_and_the_same_answer_as_a_stream() -> None:
    command = [sys.executable, str(EXAMPLE), os.environ["REDRAFT_URL"], os.environ["REDRAFT_MODEL"]]
    done = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True).stdout
    whole, rest = done.removeprefix("whole: ").split("\nbatch: ", 1)
    batch, streamed = rest.rsplit("\nstream: ", 1)
    assert "\nbatch: " in batch
    assert streamed.removesuffix("\n") == whole
