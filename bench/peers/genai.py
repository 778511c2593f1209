"""onnxruntime-genai, which generates token by token as its own examples do."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.bench.peers.base import DRAFT, LOOKED_UP, PLAIN, Decoded, Peer, PeerModel, PeerSource, run_tool
from redraft.config import Precision

SPECULATIVE: dict[str, dict[str, int]] = {
    PLAIN: {},
    **{mode: {"ngram_size": 3, "max_draft_tokens": drafted} for mode, drafted in LOOKED_UP.items()},
    DRAFT: {"max_draft_tokens": 4},
}
"""Its options by mode. It looks up a suffix one token shorter than `ngram_size`."""
CONFIG = "genai_config.json"


class GenaiDecoder:
    """An open model, which `convert` wrote."""

    def __init__(self, model: PeerModel) -> None:
        import onnxruntime_genai as genai

        self._genai = genai
        session = {"session_options": {"intra_op_num_threads": model.threads}}
        alone = self._opened(model.path, {"decoder": session})
        self._models = dict.fromkeys((PLAIN, *LOOKED_UP), alone)
        if model.draft is not None:
            with tempfile.TemporaryDirectory() as folder:
                write_pair(model.path, model.draft, Path(folder))
                self._models[DRAFT] = self._opened(Path(folder), {"decoder": session, "draft": session})
        self.modes = tuple(self._models)
        self.settings = session | {mode: SPECULATIVE[mode] for mode in self.modes[1:]}

    def _opened(self, folder: Path, overlay: dict[str, Any]) -> Any:
        config = self._genai.Config(str(folder))
        config.overlay(json.dumps({"model": overlay}))
        return self._genai.Model(config)

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """See `Decoder.decode`."""
        model = self._models[mode]
        params = self._genai.GeneratorParams(model)
        params.set_search_options(max_length=len(token_ids) + count, do_sample=False)
        if options := SPECULATIVE[mode]:
            params.set_speculative_options(**options)
        generator = self._genai.Generator(model, params)
        generator.append_tokens(list(token_ids))
        generator.generate_next_token()
        start = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        return Decoded(tuple(map(int, generator.get_sequence(0)[len(token_ids) :])), seconds)


def write_pair(target: Path, draft: Path, folder: Path) -> None:
    """Write the configuration of a model and its draft model into a folder, with links to both.

    Names of files may not leave the configuration's folder.
    """
    config, drafting = (json.loads((path / CONFIG).read_text()) for path in (target, draft))
    config["model"]["draft"] = drafting["model"]["decoder"]
    for part, path in (("decoder", target), ("draft", draft)):
        (folder / part).symlink_to(path.resolve())
        config["model"][part]["filename"] = f"{part}/{config['model'][part]['filename']}"
    (folder / CONFIG).write_text(json.dumps(config))


def convert(source: PeerSource, precision: Precision, folder: Path) -> None:
    """Run its model builder, whose defaults for CPUs are blocks of 32 and accuracy level 4.

    The only end token becomes the vocabulary's last token, so that text continues past its end. Options of opening do
    not replace several end tokens.
    """
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", precision]
    run_tool([*builder, "-i", source.checkpoint, "-o", folder, "-c", folder / "cache"])
    config = json.loads((folder / CONFIG).read_text())
    config["model"]["eos_token_id"] = config["model"]["vocab_size"] - 1
    (folder / CONFIG).write_text(json.dumps(config, indent=2))


GENAI = Peer(
    name="onnxruntime-genai",
    package="onnxruntime-genai",
    module="onnxruntime_genai",
    install="pip install 'redraft[bench,export]'",
    formats={"fp32": "builder -p fp32", "int8": "builder -p int8", "int4": "builder -p int4"},
    convert=convert,
    open=GenaiDecoder,
    pairs="config.json",
)
