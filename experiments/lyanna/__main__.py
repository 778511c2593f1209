"""The ablations of Lyanna's paper (Chen et al., §7.3 and §7.4), measured on a model of ours, whatever their sign.

    python -m experiments.lyanna acceptance --verifier assets/tiny --out RUNS --data code=stdlib …       Table 1
    python -m experiments.lyanna traces     --engines DIR … --prompts assets/tiny/prompts/*.jsonl        Table 1
    python -m experiments.lyanna resampling --engines build/engines/tiny --prompts assets/tiny/prompts/*.jsonl
    python -m experiments.lyanna latency    --engines build/engines/tiny                                 Figure 13
    python -m experiments.lyanna table      --verifier assets/tiny --drafter DIR --prompts …

`acceptance` measures over every position of texts, `traces` in decoding; `table` compares draft vocabularies (§6.1) and
stored forms of token information (§5.1); `resampling` is Figure 12. Prints tables, or one JSON object with --json. The
first part trains. With the same --out and options, it only reads its earlier runs.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from experiments.lyanna.text import render
from redraft.bench.command import as_json, budget, one_line_errors, sizes
from redraft.export import quiet_export
from redraft.types import Budget

INITS = ("random", "mtp")
PARTS = ("acceptance", "traces", "resampling", "latency", "table")
"""Each is a module of this folder with `measure` and `tables`."""


def main(arguments: list[str] | None = None) -> None:
    """Measure one part and print it; on an error print one line and exit with its status."""
    options = parser().parse_args(arguments)
    quiet_export()
    part = import_module(f"experiments.lyanna.{options.part}")
    with one_line_errors():
        result = part.measure(options)
        print(as_json(result) if options.json else render(part.tables(result)))


def parser() -> argparse.ArgumentParser:
    """Return the parser with the options of all parts."""
    found = argparse.ArgumentParser(
        prog="python -m experiments.lyanna", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = found.add_subparsers(dest="part", required=True, metavar="PART")
    adders = (_acceptance, _traces, _resampling, _latency, _table)
    for name, add in zip(PARTS, adders, strict=True):
        module = parts.add_parser(name, help=(add.__doc__ or "").rstrip("."))
        add(module)
        module.add_argument("--threads", type=int, default=2)
        module.add_argument("--json", action="store_true", help="print one JSON object")
    return found


def _acceptance(part: argparse.ArgumentParser) -> None:
    """Acceptance by step with and without token information and first token."""
    part.add_argument("--verifier", type=Path, required=True, help="folder of the verifier's checkpoint")
    part.add_argument("--data", action="append", required=True, help="KIND=SOURCE, as in `redraft train lyanna`")
    part.add_argument("--out", type=Path, required=True, help="folder of texts and runs; earlier ones are used again")
    part.add_argument("--config", default="lyanna-tiny", help="a recipe of redraft, or a .toml file")
    part.add_argument("--steps", type=int, default=80, help="training steps of every variant")
    part.add_argument("--batch-tokens", type=int, default=2048)
    part.add_argument(
        "--rows", type=int, default=192, help="texts that the verifier writes, for each kind and temperature"
    )
    part.add_argument("--held-out-rows", type=int, default=32, help="texts to measure on, for each kind")
    part.add_argument("--init", choices=INITS, help="instead of the recipe's; a start at random favours no variant")
    part.add_argument("--seed", type=int, help="instead of the recipe's")


def _traces(part: argparse.ArgumentParser) -> None:
    """Acceptance by step in decoding, for bundles of variants that `acceptance` trained."""
    part.add_argument("--engines", type=Path, nargs="+", required=True, help="engine bundles with a Lyanna drafter")
    part.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    part.add_argument("--limit", type=int, help="prompts a kind")
    part.add_argument("--chat", action="store_true", help="prompts go through the chat template")
    part.add_argument("--max-new-tokens", type=int, default=128)


def _resampling(part: argparse.ArgumentParser) -> None:
    """Speed with and without resampling."""
    part.add_argument("--engines", type=Path, required=True, help="an engine bundle with a Lyanna drafter")
    part.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    part.add_argument("--limit", type=int, help="prompts a kind")
    part.add_argument("--chat", action="store_true", help="prompts go through the chat template")
    part.add_argument(
        "--budget", type=budget, default=Budget(nodes=8, depth=4, width=4), help="nodes of the fixed trees"
    )
    part.add_argument("--thresholds", type=_thresholds, default=(0, 1, 2), help="values of r, such as 0,1,2")
    part.add_argument("--max-new-tokens", type=int, default=128)


def _latency(part: argparse.ArgumentParser) -> None:
    """Logits in one pass against one by one, and the parts of a draft."""
    part.add_argument("--engines", type=Path, required=True, help="an engine bundle with a Lyanna drafter")
    part.add_argument("--turns", type=int, default=100, help="number of timed drafts")


def _table(part: argparse.ArgumentParser) -> None:
    """Draft vocabularies and forms of the token information: bytes, time, and loss."""
    part.add_argument("--verifier", type=Path, required=True, help="folder of the verifier's checkpoint")
    part.add_argument("--drafter", type=Path, required=True, help="folder of its published drafter")
    part.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    part.add_argument("--limit", type=int, default=8, help="prompts a kind")
    part.add_argument("--new-tokens", type=int, default=128, help="tokens that the verifier writes after a prompt")
    part.add_argument(
        "--vocabularies", type=sizes, help="sizes of draft vocabularies; all and a quarter of the vocabulary by default"
    )
    part.add_argument("--chain", type=int, default=3, help="steps of a draft")
    part.add_argument("--nodes", type=int, default=12, help="largest tree of a draft")
    part.add_argument("--turns", type=int, default=100, help="number of timed drafts, for each form")
    part.add_argument("--keep", type=Path, help="a folder that keeps the bundles for the next run")


def _thresholds(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 0:
        raise ValueError(text)
    return values


if __name__ == "__main__":
    main()
