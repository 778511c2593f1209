"""Chooses prompts for the figures of docs/: equally many of each file, each file one kind.

    python -m experiments.prompt_files mt_bench.jsonl humaneval.jsonl gsm8k_test.jsonl --prompts 32 --out DIR

writes DIR/NAME.jsonl for each file: its first prompts, with the file's name as category. A file with several categories
gives equally many of each. Only first turns are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from redraft.bench.command import one_line_errors
from redraft.bench.prompts import load_prompts


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON lines with `turns`")
    parser.add_argument("--prompts", type=int, default=32, help="of each file")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for file in options.files:
        chosen = load_prompts([file])[: options.prompts]  # kinds take turns
        lines = [json.dumps({"id": p.id, "category": file.stem, "turns": [p.text]}) + "\n" for p in chosen]
        (options.out / file.name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    with one_line_errors():
        main()
