"""Perplexity of a bundle on held-out text, and of the same model in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from redraft import names
from redraft.engines import Bundle

EVALUATED_TOKENS = 2048
HERE = Path(__file__).resolve()
HELD_OUT = (HERE.parent / "heldout", HERE.parents[1] / "assets/tiny/heldout")
"""The folder of held-out text in an installed package and in the repository."""


def held_out_texts() -> dict[str, Path]:
    """Return redraft's own held-out text by kind."""
    return {path.stem: path for folder in HELD_OUT for path in sorted(folder.glob("*.txt"))}


def perplexities(bundle: Bundle, texts: Mapping[str, str], threads: int | None = None) -> dict[str, float]:
    """Return perplexity by kind of the first EVALUATED_TOKENS tokens of each text, of at least two tokens."""
    from redraft.assembly.scoring import Scorer
    from redraft.runtime.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(bundle.path / names.TOKENIZER_FILE)
    scorer = Scorer(bundle, threads)
    encoded = {kind: tokenizer.encode(text).ids[:EVALUATED_TOKENS] for kind, text in texts.items()}
    return {kind: scorer.perplexity(ids, scorer.max_model_len) for kind, ids in encoded.items() if len(ids) > 1}
