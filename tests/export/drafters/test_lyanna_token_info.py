"""Token information as engines read it against the formula RMSNorm(W2 W1 E(t)), in every form."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.weight_files import NewTensor
from redraft.export.drafters import lyanna_token_info as token_info
from redraft.export.drafters.checkpoint import TokenData
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter, lyanna_shape
from redraft.export.drafters.lyanna_token_info import make_tables
from redraft.export.drafters.writing import write_tables
from redraft.methods.lyanna import LyannaBuild, LyannaShape, token_info_tables
from redraft.methods.lyanna_token_info import lookup

from .tiny import CONFIG, VOCABULARY, arrays, random_drafter, token_data

FORMS = ["fp16", "int8", "fp8", "lowrank"]
DRAFTED = 20
EMBEDDING = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(1))


TRAINED = replace(CONFIG, draft_vocab_size=23)
"""A drafter that was trained with a draft vocabulary."""


def shape_of(form: str, drafted: int, config: LyannaConfig = CONFIG) -> LyannaShape:
    return lyanna_shape(config, LyannaBuild(token_info=form, draft_vocabulary=drafted))


def vocabulary_of(shape: LyannaShape, config: LyannaConfig = CONFIG) -> DraftVocabulary:
    return DraftVocabulary.of(token_data(config), shape.draft_vocabulary)


def made_of(
    shape: LyannaShape, embedding: np.ndarray | None = None, drafter: LyannaDrafter | None = None
) -> tuple[NewTensor, ...]:
    """Tables of the given or a random drafter, with the embedding in two slabs."""
    slabs = np.split(EMBEDDING.numpy() if embedding is None else embedding, [17])
    drafter = drafter or random_drafter()
    return make_tables(drafter.token_info, iter(slabs), vocabulary_of(shape, drafter.config), shape)


def tables_of(
    shape: LyannaShape, embedding: np.ndarray | None = None, drafter: LyannaDrafter | None = None
) -> dict[str, np.ndarray]:
    """The same tables as arrays, by name."""
    return arrays(made_of(shape, embedding, drafter))


def formula(module: LyannaDrafter) -> np.ndarray:
    """Numbers that token t adds to each column of the trained logits, [V, columns], computed in float64."""
    assert module.token_info is not None
    info = module.token_info
    x = EMBEDDING.double() @ info.down.weight.T.double() @ info.up.weight.T.double()
    normalized = x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt()
    return (normalized * info.norm.weight.double()).numpy()


def error_bound(form: str, row: np.ndarray) -> np.ndarray:
    """Half of the step between neighbouring values of the form; a row's largest entry sets the scale."""
    largest = np.abs(row).max()
    return {
        "fp16": np.abs(row) * 2.0**-11 + 1e-6,
        "int8": np.full_like(row, largest / 127 / 2 * 1.001),
        "fp8": np.abs(row) * 2.0**-4 + largest / 448 * 2.0**-10,
        "lowrank": np.full_like(row, largest * 1e-5),
    }[form]


@pytest.mark.parametrize(
    ("config", "drafted"),
    [(CONFIG, VOCABULARY), (CONFIG, DRAFTED), (TRAINED, 23), (TRAINED, 9)],
    ids=["whole", "pruned", "trained", "trained and pruned"],
)
@pytest.mark.parametrize("form", FORMS)
def test_tables_hold_the_formula_to_their_precision(form: str, config: LyannaConfig, drafted: int) -> None:
    """The root mean square covers all columns that were trained, even if most of them are dropped.

    All tokens outside of the draft vocabulary have one row: the mean of theirs, weighted by count plus 1.
    """
    shape, module = shape_of(form, drafted, config), random_drafter(config)
    vocabulary = vocabulary_of(shape, config)
    assert len(vocabulary.tokens) == drafted
    tables, exact = tables_of(shape, drafter=module), formula(module)[:, vocabulary.columns]
    others = np.delete(np.arange(VOCABULARY), vocabulary.tokens)
    if len(others):
        weights = vocabulary.counts[others] + 1.0
        exact[others] = (weights[:, None] * exact[others]).sum(0) / weights.sum()
    for token in range(VOCABULARY):
        found = lookup(tables, token)
        assert (np.abs(found - exact[token]) <= error_bound(form, exact[token])).all()


@pytest.mark.parametrize(("config", "drafted"), [(CONFIG, VOCABULARY), (CONFIG, DRAFTED), (TRAINED, 9), (CONFIG, 4)])
@pytest.mark.parametrize("form", FORMS)
def test_only_frequent_tokens_have_token_information(form: str, config: LyannaConfig, drafted: int) -> None:
    """Whatever the drafter is built with, these are the most frequent ones of those that it was trained with."""
    config = replace(config, hot_tokens=7)
    shape, module = shape_of(form, drafted, config), random_drafter(config)
    data, vocabulary = token_data(config), vocabulary_of(shape, config)
    trained = np.arange(VOCABULARY) if data.draft_vocabulary is None else data.draft_vocabulary.numpy()
    hot = trained[np.sort(np.argsort(-data.counts.numpy()[trained], kind="stable")[:7])]
    exact, columns = formula(module)[:, np.isin(hot, vocabulary.tokens)], np.isin(vocabulary.tokens, hot)
    assert columns.sum() == min(drafted, 7)
    tables = tables_of(shape, drafter=module)
    for token in range(VOCABULARY):
        found = lookup(tables, token)
        has = token in hot and token in vocabulary.tokens
        expected = exact[token] if has else np.zeros(columns.sum())
        assert (np.abs(found[columns] - expected) <= error_bound(form, expected)).all()
        assert not found[~columns].any()


@pytest.mark.parametrize("drafted", [VOCABULARY, DRAFTED], ids=["whole", "pruned"])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("fp16", lambda rows, columns: 2 * rows * columns),
        ("int8", lambda rows, columns: rows * columns + 4 * rows),
        ("fp8", lambda rows, columns: rows * columns + 4 * rows),
        ("lowrank", lambda rows, columns: 4 * (rows + columns) * CONFIG.rank),
    ],
)
def test_sizes_are_those_of_the_contract(form: str, expected, drafted: int, tmp_path: Path) -> None:
    """Without columns for all tokens, tables have a row for the others, and an index of all tokens."""
    shape = shape_of(form, drafted)
    tables = tables_of(shape)
    specs = token_info_tables(shape)
    assert [(name, str(t.dtype), t.shape) for name, t in tables.items()] == [(s.name, s.dtype, s.shape) for s in specs]
    pruned = drafted < VOCABULARY
    size = expected(drafted + pruned, drafted) + (8 * VOCABULARY if pruned else 0)
    assert sum(table.nbytes for table in tables.values()) == size
    refs = write_tables("lyanna", made_of(shape), tmp_path)
    assert {ref.file for ref in refs} == {"weights/lyanna.tables.safetensors"}
    assert sum(ref.length for ref in refs) == size
    for ref in refs:
        stored = (tmp_path / ref.file).read_bytes()[ref.offset : ref.offset + ref.length]
        assert stored == tables[ref.initializer].tobytes()


def test_slabs_do_not_change_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its own scale, in any slab."""
    before = tables_of(shape_of("int8", VOCABULARY))
    monkeypatch.setattr(token_info, "_SLAB_TOKENS", 7)
    after = tables_of(shape_of("int8", VOCABULARY))
    for name, table in before.items():
        np.testing.assert_allclose(table.astype(float), after[name].astype(float), atol=1, rtol=1e-6)


def test_memory_follows_neither_the_embedding_nor_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 128 K tokens, 4096 wide and 32 K of them drafted, each is 2 GB."""
    monkeypatch.setattr(token_info, "_SLAB_TOKENS", 64)
    config = replace(CONFIG, vocab_size=20_000)
    shape = lyanna_shape(config, LyannaBuild(draft_vocabulary=3000))
    drafter, vocabulary = random_drafter(config), DraftVocabulary.of(TokenData(torch.arange(20_000)), 3000)
    embedding_bytes, table_bytes = 4 * 20_000 * 32, 2 * 3001 * 3000
    tracemalloc.start()
    slabs = (np.zeros((1000, 32), np.float32) for _ in range(20))
    write_tables("lyanna", make_tables(drafter.token_info, slabs, vocabulary, shape), tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < min(embedding_bytes, table_bytes / 4)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_without_embedding_adds_nothing(form: str) -> None:
    """A row of zeros has no largest value to set its scale."""
    embedding = EMBEDDING.numpy().copy()
    embedding[3] = 0
    tables = tables_of(shape_of(form, VOCABULARY), embedding)
    assert not lookup(tables, 3).any()
    assert all(np.isfinite(table).all() for table in tables.values() if table.dtype.kind == "f")


@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_without_token_information_adds_nothing(form: str) -> None:
    drafter = random_drafter(replace(CONFIG, token_info=False))
    tables = tables_of(shape_of(form, DRAFTED), drafter=drafter)
    assert not any(lookup(tables, token).any() for token in range(VOCABULARY))


def test_a_large_whole_vocabulary_is_pruned_by_default() -> None:
    """More than 40 K tokens to 32 K (§6.1). A draft vocabulary that was trained stays as it is."""
    for vocab_size, trained, asked, drafted in (
        (40_000, 0, None, 40_000), (40_001, 0, None, 32_768), (40_001, 0, 39_000, 39_000), (40_001, 0, 10**6, 40_001),
        (61, 0, 20, 20), (90_000, 39_000, None, 39_000), (90_000, 39_000, 50_000, 39_000), (90_000, 39_000, 9, 9),
    ):  # fmt: skip
        config = replace(CONFIG, vocab_size=vocab_size, draft_vocab_size=trained)
        assert lyanna_shape(config, LyannaBuild(draft_vocabulary=asked)).draft_vocabulary == drafted


@pytest.mark.parametrize(
    ("options", "most", "message"),
    [
        (
            {"width": 4, "draft_vocabulary": 3},
            {"draft_vocabulary": 4},
            "cannot have 4 children of 3 tokens; lower width",
        ),
        (
            {"steps": CONFIG.steps + 1},
            {"steps": CONFIG.steps},
            f"trained for {CONFIG.steps} steps, not 4; build it with",
        ),
    ],
)
def test_options_that_the_drafter_does_not_cover(options: dict, most: dict, message: str) -> None:
    lyanna_shape(CONFIG, LyannaBuild(**options | most))
    with pytest.raises((CheckpointError, UsageError), match=message):
        lyanna_shape(CONFIG, LyannaBuild(**options))
