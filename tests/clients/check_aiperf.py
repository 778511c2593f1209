"""AIPerf as the load driver: a closed loop of streamed chats, of which none may fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REQUESTS, CLIENTS, TOKENS = 24, 4, 24
PROMPTS = Path(__file__).parents[2] / "assets/tiny/prompts"


def test_no_request_of_a_load_fails(url: str, model: str, tmp_path: Path) -> None:
    turns = [
        json.loads(line)["turns"][0]
        for file in sorted(PROMPTS.glob("*.jsonl"))
        for line in file.read_text().splitlines()[:8]
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": turn[:300]}) + "\n" for turn in turns))
    command = [
        Path(sys.executable).with_name("aiperf"), "profile", "--model", model, "--url", url, "--endpoint-type", "chat",
        "--streaming", "--input-file", file, "--custom-dataset-type", "single_turn", "--request-count", str(REQUESTS),
        "--concurrency", str(CLIENTS), "--extra-inputs", f"max_tokens:{TOKENS}", "--use-server-token-count",
        "--tokenizer", Path(__file__).parents[2] / "assets/tiny", "--artifact-dir", tmp_path / "out", "--ui", "none",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (found,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    figures = json.loads(found.read_text())
    assert figures["request_count"]["avg"] == REQUESTS
    assert not figures.get("error_request_count")
    assert not figures.get("error_summary")
