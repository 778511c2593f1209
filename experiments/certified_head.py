"""How much of a head would have to be multiplied if bounds proved which token has the largest logit.

    python -m experiments.certified_head --verifier smollm2-135m --prompts assets/smollm2/prompts/mt_bench.jsonl --chat

With the factors of `redraft.export.drafters.draft_head` at the full rank, a logit is the sum over n coordinates of
L[i] * (R x). The first r of them are multiplied for all tokens. The others are at most the sum over GROUPS groups of
coordinates of |L[i]| |R x|, by Cauchy and Schwarz. A token whose bound is below the largest logit cannot be the best
one. Its row need not be read further. The largest logit is taken as known, as if a drafter had guessed the token.

`read` is the part of the head that is read: r of n coordinates of all tokens, and the rest of the tokens that are left,
for one state and for the states of one verification, which share what they read. An exact head reads 1. Rounding of the
factors would only widen the bounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from experiments.factorized_head import answers, moment_of, states_after
from redraft.assembly.models import find_checkpoint
from redraft.bench.command import run, sizes
from redraft.export.drafters.draft_head import fitted
from redraft.train.verifier_model import open_verifier

GROUPS = 4
"""Groups of the other coordinates, each with a norm."""


def left_of(left: torch.Tensor, states: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the tokens [M, H] that the bounds do not exclude, as bool.

    left: L [H, n].   states: R x of M states, [M, n].
    """
    bounds = states[:, :rank] @ left[:, :rank].mT
    size = -(-(left.shape[1] - rank) // GROUPS)
    for rows, own in zip(left[:, rank:].split(size, 1), states[:, rank:].split(size, 1), strict=True):
        bounds += own.norm(dim=1)[:, None] * rows.norm(dim=1)
    return bounds >= (states @ left.mT).amax(1, keepdim=True) * (1 - 1e-6)


def certify(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parts of the head that are read, by rank."""
    verifier = open_verifier(find_checkpoint(options.verifier, lambda line: None), "cpu")
    weight = verifier.model.get_output_embeddings().weight.detach().float()
    hidden = weight.shape[1]
    basis, right = fitted((weight.mT @ weight).double().numpy(), hidden, moment_of(verifier))
    left = weight @ torch.from_numpy(basis)
    states = states_after(verifier, answers(verifier, options)) @ torch.from_numpy(right).mT
    states = states[: len(states) // options.rows * options.rows]
    found = {}
    for rank in options.ranks:
        one = together = 0.0
        for step in states.split(options.rows):
            kept = left_of(left, step, rank)
            one += float(kept.float().mean())
            together += float(kept.any(0).float().mean())
        steps, read = len(states) // options.rows, rank / hidden
        shares = {"one": one / steps, "together": together / steps}
        found[str(rank)] = {
            name: {"left": round(share, 4), "read": round(read + (1 - read) * share, 4)}
            for name, share in shares.items()
        }
    return {"states": len(states), "hidden": hidden, "rows": options.rows, "ranks": found}


def main() -> None:
    """Parse the command line, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", required=True, help="a checkpoint's folder, a GGUF file or a recipe")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--limit", type=int, default=4, help="at most this many prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true", help="ask through the verifier's chat template")
    parser.add_argument("--rows", type=int, default=8, help="states of one verification")
    parser.add_argument("--ranks", type=sizes, default=(128, 256, 384, 512))
    options = parser.parse_args()
    run(lambda: certify(options))


if __name__ == "__main__":
    main()
