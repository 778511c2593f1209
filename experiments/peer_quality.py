"""Quality of peers' converted models and of bundles, on the same held-out tokens: are their speeds of equal quality?

    python -m experiments.peer_quality --engines INT8 INT4 --checkpoint DIR --keep MODELS \\
        --optimum-cli V/bin/optimum-cli

The reference is transformers' model of the checkpoint in fp32. Peers' models are those that `redraft.bench.peers` made
with the same `--checkpoint` and `--keep`, or are made now. onnxruntime-genai runs its own; those of OpenVINO GenAI run
in OpenVINO itself, since it returns no logits. Each text is one sequence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from redraft.assembly.quality import Scorer
from redraft.assembly.resolve import held_out_texts
from redraft.bench.command import run
from redraft.bench.environment import environment
from redraft.bench.peers.base import Peer, PeerError, PeerSource, converted
from redraft.bench.peers.command import bundles_of
from redraft.bench.peers.genai import GENAI
from redraft.bench.peers.openvino import EXACT, OPENVINO
from redraft.bench.peers.ours import NAME
from redraft.cli.quality import SURE
from redraft.config import Precision
from redraft.engines import open_bundle
from redraft.errors import UsageError
from redraft.files import read_text
from redraft.runtime.text.tokenizer import Tokenizer
from redraft.types import FloatArray

Logits = Callable[[Sequence[int]], Iterable[FloatArray]]
"""Logits after each token of a text, [T, V], in one part or several."""
_ROWS = 64
"""Rows that are compared at once, in fp64."""


class Scored(NamedTuple):
    """A text: negative log-likelihoods of its tokens after the first, and the likeliest tokens at their places."""

    losses: NDArray[np.float64]
    likeliest: NDArray[np.int64]


def main() -> dict[str, Any]:
    """Score the texts by each model, one after another, and compare with the checkpoint in fp32."""
    options = _arguments()
    if not options.checkpoint.is_dir():
        raise UsageError(f"no checkpoint folder {options.checkpoint}", "check --checkpoint")
    bundles = bundles_of(options.engines)
    manifest = open_bundle(options.engines[0]).manifest
    tokenizer = Tokenizer.load(options.engines[0], manifest.bos_token_id, next(iter(manifest.eos_token_ids), None))
    longest = min(options.tokens, manifest.max_model_len)
    texts = {kind: tokenizer.encode(read_text(path))[:longest] for kind, path in held_out_texts().items()}
    exact = score(of_transformers(options.checkpoint), texts)
    found, failed = dict[str, Any](), dict[str, str]()
    for precision in bundles:
        found[precision] = {}
        for name, opened in _models(options, bundles, precision).items():
            print(f"{name} {precision}", file=sys.stderr, flush=True)
            try:
                found[precision][name] = figures(score(opened(), texts), exact)
            except PeerError as error:
                failed[f"{name} {precision}"] = str(error)
    return {
        "environment": environment(options.threads),
        "tokens": {kind: len(ids) for kind, ids in texts.items()},
        "perplexity_fp32": {kind: float(np.exp(one.losses.mean())) for kind, one in exact.items()},
        "models": found,
        "failed": failed,
    }


def _models(
    options: argparse.Namespace, bundles: Mapping[Precision, Path], precision: Precision
) -> dict[str, Callable[[], Logits]]:
    """Return what opens each model of a precision: ours, and those of peers that are installed and offer it."""
    source = PeerSource(options.checkpoint, options.optimum_cli)

    def of_peer(peer: Peer, opened: Callable[[Path, Precision], Logits]) -> Logits:
        return opened(converted(peer, source, precision, options.keep), precision)

    models: dict[str, Callable[[], Logits]] = {
        NAME: lambda: Scorer(open_bundle(bundles[precision]), options.threads).logits
    }
    return models | {
        peer.name: partial(of_peer, peer, opened)
        for peer, opened in ((GENAI, of_genai), (OPENVINO, of_openvino))
        if peer.installed and precision in peer.formats
    }


def score(logits: Logits, texts: Mapping[str, Sequence[int]]) -> dict[str, Scored]:
    """Return the scores of each text. Raises PeerError for a model that does not return a row for each token."""
    found = {}
    for kind, ids in texts.items():
        losses, likeliest = list[float](), list[int]()
        for rows in _few(logits(ids)):
            targets = ids[1 + len(losses) :][: len(rows)]  # one fewer at the end
            wide = rows[: len(targets)].astype(np.float64)
            top = wide.max(-1)
            total = top + np.log(np.exp(wide - top[:, None]).sum(-1))
            losses += (total - wide[np.arange(len(wide)), targets]).tolist()
            likeliest += wide.argmax(-1).tolist()
        if len(losses) != len(ids) - 1:
            raise PeerError(f"expected logits after {len(ids)} tokens, found fewer: {len(losses)}")
        found[kind] = Scored(np.array(losses), np.array(likeliest))
    return found


def _few(parts: Iterable[FloatArray]) -> Iterator[FloatArray]:
    for part in parts:
        for first in range(0, len(part), _ROWS):
            yield part[first : first + _ROWS]


def figures(scored: Mapping[str, Scored], exact: Mapping[str, Scored]) -> dict[str, Any]:
    """Return the figures of each kind of text, and of all of them together (`compared`)."""
    pairs = {kind: (one, exact[kind]) for kind, one in scored.items()}
    pairs["all"] = (joined(scored), joined(exact))
    return {kind: compared(*pair) for kind, pair in pairs.items()}


def joined(scored: Mapping[str, Scored]) -> Scored:
    """Return the texts as one."""
    return Scored(*map(np.concatenate, zip(*scored.values(), strict=True)))


def compared(scored: Scored, exact: Scored) -> dict[str, float]:
    """Return the rise of perplexity over fp32 and half of its 95 % interval, in percent, and the share of places whose
    likeliest token is that in fp32."""
    more = scored.losses - exact.losses
    return {
        "rise": 100 * float(np.expm1(more.mean())),
        "rise_error": 100 * SURE * float(more.std() / np.sqrt(len(more))),
        "same_tokens": float((scored.likeliest == exact.likeliest).mean()),
    }


def of_transformers(checkpoint: Path) -> Logits:
    """Open the checkpoint in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def logits(ids: Sequence[int]) -> Iterable[FloatArray]:
        with torch.inference_mode():
            yield model(torch.tensor([list(ids)])).logits[0].numpy()

    return logits


def of_genai(folder: Path, _: Precision) -> Logits:
    """Open a model of onnxruntime-genai."""
    import onnxruntime_genai as genai

    model = genai.Model(str(folder))

    def logits(ids: Sequence[int]) -> Iterable[FloatArray]:
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=len(ids) + 1)
        generator = genai.Generator(model, params)
        generator.append_tokens(list(ids))
        yield generator.get_output("logits")[0]

    return logits


def of_openvino(folder: Path, precision: Precision) -> Logits:
    """Open the graph of a model of OpenVINO GenAI, with the properties that its speed is measured with."""
    import openvino

    properties = EXACT if precision == "fp32" else {}
    request = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", properties).create_infer_request()

    def logits(ids: Sequence[int]) -> Iterable[FloatArray]:
        count = len(ids)
        request.reset_state()
        ones, places = np.ones((1, count), np.int64), np.arange(count)[None]
        inputs = {"input_ids": np.array([ids]), "attention_mask": ones, "position_ids": places}
        yield request.infer(inputs | {"beam_idx": np.zeros(1, np.int32)})["logits"][0]

    return logits


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, nargs="+", help="a bundle of each precision")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint of all bundles, a folder")
    parser.add_argument("--keep", type=Path, required=True, help="the folder of the peers' models")
    exporter = Path(sys.executable).with_name("optimum-cli")
    parser.add_argument("--optimum-cli", type=Path, default=exporter, help="exports to OpenVINO")
    parser.add_argument("--tokens", type=int, default=1000, help="of each text")
    parser.add_argument("--threads", type=int, default=2, help="of the bundles")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
