"""Every build compares the engines with transformers, which finds faults that no other check finds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.export.models import traced_once  # noqa: F401  (a fixture)
from tests.export.models import write_checkpoint as write_large
from tests.little import CONTEXT, WORDS, write_tokenizer

from redraft.assembly import product_check
from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.assembly.self_check import KnownText, check_bundle, known_texts
from redraft.config import BuildConfig
from redraft.engines import open_bundle
from redraft.engines.manifest import load_manifest
from redraft.errors import BackendError, UnsupportedModelError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.graph import attention
from redraft.export.quantization import products, rounding
from redraft.export.quantization.calibrate import Calibrator
from redraft.export.reference import reference_logits
from redraft.runtime.trees.tree import make_tree

pytestmark = pytest.mark.usefixtures("traced_once")


def build(checkpoint: Path, out: Path, texts: dict[str, str] | None = None, **config) -> list[str]:
    """Build in this process, and return the reported lines."""
    lines: list[str] = []
    model = Model("little", "little", checkpoint)
    build_bundle(model, BuildConfig(**config), out, texts, True, lines.append)
    return lines


@pytest.fixture
def narrow_masks(monkeypatch):
    """Plant a fault: every layer sees only the last three tokens."""
    honest = attention.mask_of
    monkeypatch.setattr(attention, "mask_of", lambda *arguments: attention.Mask(3) if honest(*arguments) else None)


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_a_wrong_export_is_refused(checkpoint, tmp_path, narrow_masks, precision):
    with pytest.raises(UnsupportedModelError, match="the exported model differs from the checkpoint"):
        build(checkpoint, tmp_path / "engines", precision=precision)
    assert not list(tmp_path.iterdir())


def test_the_check_can_be_left_out_and_then_the_bundle_is_not_current(checkpoint, tmp_path, narrow_masks):
    out, lines = tmp_path / "engines", []
    build_bundle(Model("little", "little", checkpoint), BuildConfig(), out, report=lines.append, check=False)
    assert (out / "manifest.json").is_file()
    assert not [line for line in lines if line.startswith("checked")]
    with pytest.raises(UnsupportedModelError, match="the exported model differs from the checkpoint"):
        build_bundle(Model("little", "little", checkpoint), BuildConfig(), out)


def test_too_little_memory_for_the_check_is_an_error(checkpoint, tmp_path, monkeypatch):
    """A bundle without comparison is current only if the user asks for it."""
    monkeypatch.setattr("redraft.assembly.self_check.available_bytes", lambda: 1000)
    with pytest.raises(BackendError, match=r"checking 2 layers in fp32 takes .* or build with --skip-check"):
        build(checkpoint, tmp_path / "engines")
    assert not list(tmp_path.iterdir())


def test_weights_in_another_order_are_refused(checkpoint, tmp_path, monkeypatch):
    honest = rounding.codes_of
    monkeypatch.setattr(rounding, "codes_of", lambda *arguments: honest(*arguments)[::-1])
    with pytest.raises(UnsupportedModelError, match=r"the stored weight of .* differs"):
        build(checkpoint, tmp_path / "engines", precision="int4")


def test_a_product_that_is_not_of_its_codes_is_refused(checkpoint, tmp_path, monkeypatch):
    """The expected sums of blocks are a twentieth larger than the engine's."""
    honest = product_check._with_sums

    def larger(x, product, stored):
        given = honest(x, product, stored)
        return np.concatenate([given[:, : product.columns], given[:, product.columns :] * np.float32(1.05)], 1)

    monkeypatch.setattr(product_check, "_with_sums", larger)
    with pytest.raises(UnsupportedModelError, match=r"the product of .* differs"):
        build(checkpoint, tmp_path / "engines", precision="int4")


def test_looked_up_rows_of_other_tokens_are_refused(checkpoint, tmp_path, monkeypatch):
    honest = products._rounded_rows
    monkeypatch.setattr(products, "_rounded_rows", lambda rows, block: tuple(x[::-1] for x in honest(rows, block)))
    with pytest.raises(UnsupportedModelError, match=r"the stored weight of model\.embed_tokens\.weight differs"):
        build(checkpoint, tmp_path / "engines", precision="int8")


def test_rows_in_the_middle_of_a_large_weight_are_compared(tmp_path, monkeypatch):
    """The products' results are those of the wrong codes, and modules take results as they are."""
    large = write_large(tmp_path / "large", "llama", intermediate_size=400, vocab_size=len(WORDS), num_hidden_layers=1)
    write_tokenizer(large)
    honest = rounding.codes_of

    def exchanged(weight, grid, bits):
        codes = honest(weight, grid, bits)
        if len(codes) == 400:
            codes[150:250] = codes[150:250][::-1].copy()
        return codes

    monkeypatch.setattr(rounding, "codes_of", exchanged)
    with pytest.raises(UnsupportedModelError, match=r"the stored weight of .*mlp.* differs"):
        build(large, tmp_path / "engines", precision="int8")


@pytest.mark.parametrize(("architecture", "size"), [("opt", 64), ("gpt2", 48)])
def test_tables_of_positions_are_accepted(tmp_path, architecture, size):
    """Their rows are looked up by positions, which OPT shifts, and not by tokens. Rows of 48 stay in fp32."""
    folder = write_large(tmp_path / "model", architecture, vocab_size=len(WORDS), hidden_size=size, num_hidden_layers=1)
    write_tokenizer(folder)
    assert [line for line in build(folder, tmp_path / "engines", precision="int8") if line.startswith("checked")]


def test_uneven_smoothing_is_accepted(checkpoint, tmp_path, monkeypatch):
    """Inputs that are divided by large factors give their weights more of a block's codes than the others have."""
    monkeypatch.setattr(
        Calibrator, "_best_factors", lambda self, whole, *_: torch.logspace(-1.5, 1.5, whole[0].shape[1]).flip(0)
    )
    lines = build(checkpoint, tmp_path / "engines", texts={"words": "the cat sat on the mat. " * 9}, precision="int8")
    assert any("products are smoothed" in choice for choice in load_manifest(tmp_path / "engines").choices)
    assert any(line.startswith("checked: ") for line in lines)


def test_trees_are_accepted_in_both_graphs_and_texts_may_have_two_tokens(checkpoint, bundle):
    opened, config = open_bundle(bundle), Checkpoint.open(checkpoint).config
    for length in (CONTEXT, 2):
        texts = known_texts(len(WORDS), config, length)
        logits = reference_logits(Checkpoint.open(checkpoint), texts)
        short = replace(opened, manifest=replace(opened.manifest, max_model_len=length))
        tokens, accepted = map(int, re.findall("[0-9]+", check_bundle(short, texts, logits, "fp32")))
        assert tokens > 0
        assert (0 < accepted < tokens) == (length > 2)


def test_the_known_text_is_accepted_behind_wrong_siblings():
    sampler = KnownText([5, 6, 7, 8, 9])
    tree = make_tree([6, 1, 7, 2, 8], [-1, 0, 0, 2, 2], [1.0, 0.9, 0.8, 0.7, 0.6])
    logits = np.arange(10, dtype=np.float32).reshape(5, 2)
    outcome = sampler.verify(logits, tree, [5, 6])
    assert outcome.path == (2, 4)
    assert outcome.tokens == (7, 8, 9)
    assert {position: row.tolist() for position, row in sampler.rows.items()} == {1: [0, 1], 2: [4, 5], 3: [8, 9]}


def test_texts_avoid_tokens_with_a_meaning():
    config = {"eos_token_id": [1, 2], "text_config": {"pad_token_id": 0}, "image_token_index": 3}
    assert not {token for text in known_texts(8, config, 64) for token in text} & {0, 1, 2, 3}
