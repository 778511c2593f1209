"""The factorized head of drafts (`redraft.export.drafters.draft_head`): the tokens that it finds, and its time.

    python -m experiments.factorized_head recall --verifier smollm2-135m --drafter assets/smollm2/lyanna \\
        --prompts assets/smollm2/prompts/mt_bench.jsonl --chat
    python -m experiments.factorized_head time --engines build/engines/smollm2-135m

`recall` compares heads with the exact one. The states are the verifier's after the tokens of its greedy answers, and
the drafter's own. For a factorized head, recall@8 is the share of the 8 best tokens among the candidates; for a draft
vocabulary, the share of those that it has. `acceptance` is the share of right tokens by depth, as `redraft train
acceptance` prints it: the most probable token / one of the four most probable.

`time` runs heads with random weights of a bundle's sizes in int8 alone, after each verification of the bundle.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from experiments.head_times import head_times
from redraft.assembly.models import find_checkpoint
from redraft.assembly.resolve import held_out_texts
from redraft.assembly.verifier import windows
from redraft.bench.command import run, sizes
from redraft.export.drafters.checkpoint import TOKEN_COUNTS, WEIGHTS_FILE, DrafterCheckpoint
from redraft.export.drafters.draft_head import CANDIDATES, DraftHead, fitted
from redraft.export.drafters.draft_vocabulary import most_frequent
from redraft.train.acceptance import acceptance_of
from redraft.train.batches import Batch
from redraft.train.distillation import Distillation
from redraft.train.drafter_evaluate import open_drafter, read_prompts
from redraft.train.questions import ChatTurns
from redraft.train.text_batches import text_batch
from redraft.train.verifier_model import VerifierModel, open_verifier
from redraft.train.writer import continue_greedily

BEST = 8
ROWS = 128
"""States whose logits are in memory at once."""


@dataclass(frozen=True)
class Head:
    """A way to compute logits [B, T, H] of states [B, T, n] and their exact logits.

    found: the columns [M, H] that the way can find for states [M, n], as bool.
    """

    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    found: Callable[[torch.Tensor], torch.Tensor]


def factorized(weight: torch.Tensor, rank: int, second_moment: NDArray[np.float64]) -> Head:
    """Return the head of a rank, as graphs have it."""
    gram = (weight.mT @ weight).double().numpy()
    basis, right = (torch.from_numpy(factor) for factor in fitted(gram, rank, second_moment))
    head = DraftHead(*weight.shape, rank, torch.float32)
    left = weight @ basis
    head.load_state_dict({"weight": weight, "left": left, "right": right}, assign=True)

    def found(states: torch.Tensor) -> torch.Tensor:
        scores = states @ right.mT @ left.mT
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(CANDIDATES).indices, True)

    return Head(lambda states, exact: head(states), found)


def limited(weight: torch.Tensor, counts: torch.Tensor, tokens: int) -> Head:
    """Return the head of a draft vocabulary: the most frequent tokens by counts [H]."""
    columns = torch.zeros(len(weight), dtype=torch.bool)
    columns[torch.from_numpy(most_frequent(counts, tokens))] = True
    return Head(
        lambda states, exact: exact.masked_fill(~columns, -1e30), lambda states: columns.expand(len(states), -1)
    )


def heads_of(
    weight: torch.Tensor, counts: torch.Tensor, moment: NDArray[np.float64], ranks: Iterable[int], tokens: Iterable[int]
) -> dict[str, Head]:
    """Return all heads to compare by name, the exact one first. moment: of the verifier's states."""
    exact = Head(lambda states, exact: exact, lambda states: torch.ones(len(states), len(weight)).bool())
    plain = np.eye(weight.shape[1])
    heads = {"exact": exact, "plain SVD, rank 128": factorized(weight, 128, plain)}
    heads |= {f"rank {rank}": factorized(weight, rank, moment) for rank in ranks}
    return heads | {f"{size} tokens": limited(weight, counts, size) for size in tokens if size < len(weight)}


def agreement(heads: Mapping[str, Head], weight: torch.Tensor, states: torch.Tensor) -> dict[str, dict[str, float]]:
    """Return recall@8, the share of the 8 best tokens in the same order, and that of equal best tokens, by head.

    states: [M, n].
    """
    sums = np.zeros((len(heads), 3))
    for some in states.split(ROWS):
        exact = some @ weight.mT
        best = exact.topk(BEST).indices
        for place, head in enumerate(heads.values()):
            same = head.logits(some[None], exact[None])[0].topk(BEST).indices == best
            parts = head.found(some).gather(1, best), same, same[:, 0] * BEST
            sums[place] += [float(part.sum()) for part in parts]
    columns = "recall@8", "same order", "same best"
    shares = (sums / len(states) / BEST).round(4).tolist()
    return {name: dict(zip(columns, row, strict=True)) for name, row in zip(heads, shares, strict=True)}


@torch.inference_mode()
def moment_of(verifier: VerifierModel) -> NDArray[np.float64]:
    """Return the second moment of the verifier's states on the text that builds take."""
    encoded = [verifier.tokenizer.encode(path.read_text()).ids for path in held_out_texts().values()]
    rows = [
        verifier.model.base_model(torch.tensor([list(part)])).last_hidden_state[0].double()
        for part in windows(encoded, verifier.max_positions or 512)
    ]
    states = torch.cat(rows)
    found: NDArray[np.float64] = (states.mT @ states / len(states)).numpy()
    return found


def answers(verifier: VerifierModel, options: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Return texts of prompts with the verifier's greedy answers, and the tokens of each prompt."""
    asked = [prompt for some in read_prompts(options.prompts, options.limit).values() for prompt in some]
    turns = ChatTurns.of(str(verifier.texts), verifier.ends) if options.chat else None
    ids = [turns.ask(prompt) if turns else tuple(verifier.tokenizer.encode(prompt).ids) for prompt in asked]
    written = continue_greedily(verifier.model, ids, options.new_tokens, turns.ends if turns else verifier.ends)
    return [(text, len(prompt)) for prompt, text in zip(ids, written, strict=True)]


@torch.inference_mode()
def states_after(verifier: VerifierModel, texts: Iterable[tuple[Sequence[int], int]]) -> torch.Tensor:
    """Return the verifier's states [M, n] after the tokens of all answers."""
    of_texts = (verifier.model.base_model(torch.tensor([text])).last_hidden_state[0, first:] for text, first in texts)
    return torch.cat([*of_texts]).float()


def drafted(objective: Distillation, batches: Sequence[Batch], heads: Mapping[str, Head]) -> Iterator[dict[str, Any]]:
    """Yield a row of each head for a drafter: the agreement on its own states, and acceptance by depth."""
    states: list[torch.Tensor] = []

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        states.append(hidden.flatten(0, -2).float())
        return objective.head.new_zeros(*hidden.shape[:-1], len(objective.head))

    objective.__dict__["head_logits"] = recorded
    with torch.inference_mode():
        batches = [replace(batch, states=objective.states(batch)) for batch in batches]
        for batch in batches:
            for _ in objective.drafts(batch, objective.states(batch)):
                pass
    agreements = agreement(heads, objective.head, torch.cat(states))
    for name, head in heads.items():
        objective.__dict__["head_logits"] = partial(_logits, head, objective.head)
        yield {"head": name, **agreements[name], "acceptance": str(acceptance_of(objective, batches))}


def _logits(head: Head, weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    return head.logits(states, states @ weight.mT)


def recall(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the heads on the verifier's states, and on a drafter's."""
    verifier = open_verifier(find_checkpoint(options.verifier, lambda line: None), "cpu")
    moment, texts = moment_of(verifier), answers(verifier, options)
    objective = open_drafter(DrafterCheckpoint.open(options.drafter), verifier) if options.drafter else None
    weight = verifier.model.get_output_embeddings().weight.detach().float()
    counts = trained_counts(options.drafter) if options.drafter else own_counts(verifier)
    states = states_after(verifier, texts)
    heads = heads_of(weight, counts, moment, options.ranks, options.tokens)
    rows = [{"head": name, **row} for name, row in agreement(heads, weight, states).items()]
    found: dict[str, Any] = {"candidates": CANDIDATES, "states": len(states), "verifier": rows}
    if objective:
        batches = [
            text_batch([{"tokens": np.array(text)}], [prompt], ("",))
            for text, prompt in texts
            if len(text) >= prompt + objective.lookahead
        ]
        own = heads_of(
            objective.head.float(), objective.vocabulary.rows_of(counts), moment, options.ranks, options.tokens
        )
        found["drafter"] = [*drafted(objective, batches, own)]
    return found


def trained_counts(drafter: Path) -> torch.Tensor:
    """Return how often each token was in a drafter's training texts."""
    with safe_open(drafter / WEIGHTS_FILE, "pt") as tensors:
        found: torch.Tensor = tensors.get_tensor(TOKEN_COUNTS).long()
    return found


def own_counts(verifier: VerifierModel) -> torch.Tensor:
    """Return how often each token is in redraft's held-out text."""
    ids = [token for path in held_out_texts().values() for token in verifier.tokenizer.encode(path.read_text()).ids]
    return torch.bincount(torch.tensor(ids), minlength=verifier.vocab_size)


def main() -> None:
    """Parse the command line, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    finding = parts.add_parser("recall")
    finding.add_argument("--verifier", required=True, help="a checkpoint's folder, a GGUF file or a recipe")
    finding.add_argument("--drafter", type=Path, help="a trained drafter's folder")
    finding.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    finding.add_argument("--limit", type=int, default=8, help="at most this many prompts of each kind")
    finding.add_argument("--new-tokens", type=int, default=96)
    finding.add_argument("--chat", action="store_true", help="ask through the verifier's chat template")
    timing = parts.add_parser("time")
    timing.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    timing.add_argument("--threads", type=int, default=2)
    timing.add_argument("--turns", type=int, default=100)
    for part in (finding, timing):
        part.add_argument("--ranks", type=sizes, default=(64, 128, 192))
        part.add_argument("--tokens", type=sizes, default=(8192, 16384), help="sizes of draft vocabularies")
    options = parser.parse_args()
    run(lambda: recall(options) if options.part == "recall" else head_times(options))


if __name__ == "__main__":
    main()
