"""Token information as engines read it against the formula RMSNorm(W2 W1 E(t)), in every form."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from redraft import names
from redraft.errors import CheckpointError
from redraft.export.drafters import lyanna_token_info as token_info
from redraft.export.drafters.lyanna import LyannaDrafter
from redraft.export.drafters.lyanna_graphs import lyanna_shape
from redraft.export.drafters.lyanna_token_info import hot_tokens, make_tables, write
from redraft.export.drafters.lyanna_token_tree import lookup
from redraft.export.weight_files import NewTensor
from redraft.methods.lyanna import LyannaBuild, LyannaShape, token_info_tables

from .tiny import CONFIG, VOCABULARY, arrays, counts, random_drafter

FORMS = ["fp16", "int8", "fp8", "lowrank"]
HOT = 20
FILE = "weights/lyanna.token_info.safetensors"
EMBEDDING = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(1))


def shape_of(form: str, hot: int) -> LyannaShape:
    """Choose hot tokens like a build: only if the vocabulary is larger than `prune_above`."""
    options = LyannaBuild(token_info=form, hot_tokens=hot, prune_above=VOCABULARY - (hot < VOCABULARY))
    return lyanna_shape(CONFIG, options)


def made_of(
    shape: LyannaShape, embedding: np.ndarray | None = None, drafter: LyannaDrafter | None = None
) -> tuple[NewTensor, ...]:
    """Tables of the given or a random drafter, with the embedding in two slabs."""
    slabs = np.split(EMBEDDING.numpy() if embedding is None else embedding, [17])
    return make_tables(drafter or random_drafter(), iter(slabs), counts(), shape)


def tables_of(
    shape: LyannaShape, embedding: np.ndarray | None = None, drafter: LyannaDrafter | None = None
) -> dict[str, np.ndarray]:
    """The same tables as arrays, by name."""
    return arrays(made_of(shape, embedding, drafter))


def formula() -> np.ndarray:
    """Numbers that token t adds to the logit of token u, [V, V], computed in float64."""
    module = random_drafter()
    assert module.token_info is not None
    info = module.token_info
    x = EMBEDDING.double() @ info.down.weight.T.double() @ info.up.weight.T.double()
    normalized = x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt()
    return (normalized * info.norm.weight.double() * CONFIG.draft_logit_scale).numpy()


def error_bound(form: str, row: np.ndarray) -> np.ndarray:
    """Half of the step between neighbouring values of the form; a row's largest entry sets the scale."""
    largest = np.abs(row).max()
    return {
        "fp16": np.abs(row) * 2.0**-11 + 1e-6,
        "int8": np.full_like(row, largest / 127 / 2 * 1.001),
        "fp8": np.abs(row) * 2.0**-4 + largest / 448 * 2.0**-10,
        "lowrank": np.full_like(row, largest * 1e-5),
    }[form]


@pytest.mark.parametrize("hot", [VOCABULARY, HOT], ids=["whole", "pruned"])
@pytest.mark.parametrize("form", FORMS)
def test_tables_hold_the_formula_to_their_precision_and_cold_tokens_add_nothing(form: str, hot: int) -> None:
    """The root mean square covers the whole vocabulary, even if most columns are dropped."""
    shape = shape_of(form, hot)
    tables = tables_of(shape)
    exact, warm = formula(), np.zeros(VOCABULARY, bool)
    warm[hot_tokens(counts(), hot)] = True
    assert warm.sum() == hot
    for token in range(VOCABULARY):
        found = lookup(list(tables.values()), token)
        expected = np.where(warm & warm[token], exact[token], 0.0)
        assert (np.abs(found - expected) <= error_bound(form, expected)).all()
        assert not found[~warm].any()


@pytest.mark.parametrize("hot", [VOCABULARY, HOT], ids=["whole", "pruned"])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("fp16", lambda rows: 2 * rows * rows),
        ("int8", lambda rows: rows * rows + 4 * rows),
        ("fp8", lambda rows: rows * rows + 4 * rows),
        ("lowrank", lambda rows: 2 * 4 * rows * CONFIG.rank),
    ],
)
def test_sizes_are_those_of_the_contract(form: str, expected, hot: int, tmp_path: Path) -> None:
    """If not every token is hot, tables have one more row and column, and an index of all tokens."""
    shape = shape_of(form, hot)
    tables = tables_of(shape)
    specs = token_info_tables(shape)
    assert [(name, str(t.dtype), t.shape) for name, t in tables.items()] == [(s.name, s.dtype, s.shape) for s in specs]
    pruned = hot < VOCABULARY
    size = expected(hot + pruned) + (8 * VOCABULARY if pruned else 0)
    assert sum(table.nbytes for table in tables.values()) == size
    refs = write(made_of(shape), tmp_path, FILE)
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
    """For 128 K tokens, 4096 wide and 32 K of them hot, each is 2 GB."""
    monkeypatch.setattr(token_info, "_SLAB_TOKENS", 64)
    config = replace(CONFIG, vocab_size=20_000)
    shape = lyanna_shape(config, LyannaBuild(hot_tokens=3000, prune_above=1))
    drafter, seen = random_drafter(config), torch.arange(20_000)
    embedding_bytes, table_bytes = 4 * 20_000 * 32, 2 * 3001 * 3001
    tracemalloc.start()
    slabs = (np.zeros((1000, 32), np.float32) for _ in range(20))
    write(make_tables(drafter, slabs, seen, shape), tmp_path, FILE)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < min(embedding_bytes, table_bytes / 4)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_without_embedding_adds_nothing(form: str) -> None:
    """A row of zeros has no largest value to set its scale."""
    embedding = EMBEDDING.numpy().copy()
    embedding[3] = 0
    tables = tables_of(shape_of(form, VOCABULARY), embedding)
    assert not lookup(list(tables.values()), 3).any()
    assert all(np.isfinite(table).all() for table in tables.values() if table.dtype.kind == "f")


@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_without_token_information_adds_nothing(form: str) -> None:
    drafter = random_drafter(replace(CONFIG, token_info=False))
    tables = tables_of(shape_of(form, HOT), drafter=drafter)
    assert not any(lookup(list(tables.values()), token).any() for token in range(VOCABULARY))


def test_hot_tokens_are_the_most_frequent_and_of_equals_those_of_lower_id() -> None:
    seen = torch.tensor([5, 0, 7, 5, 5, 9, 0])
    assert [hot_tokens(seen, hot).tolist() for hot in (1, 2, 3, 4, 6, 7)] == [
        [5], [2, 5], [0, 2, 5], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5], list(range(7)),
    ]  # fmt: skip


def test_the_index_maps_hot_tokens_to_rows_and_cold_ones_to_the_last(tmp_path: Path) -> None:
    tables = tables_of(shape_of("fp16", HOT))
    index, hot = tables[f"{names.TOKEN_INFO}index"], hot_tokens(counts(), HOT)
    assert index[hot].tolist() == list(range(HOT))
    assert (np.delete(index, hot) == HOT).all()


def test_pruning_begins_above_its_limit() -> None:
    for limit, hot in ((VOCABULARY, VOCABULARY), (VOCABULARY - 1, HOT)):
        shape = lyanna_shape(CONFIG, LyannaBuild(hot_tokens=HOT, prune_above=limit))
        assert shape.hot == hot
    assert lyanna_shape(CONFIG, LyannaBuild(hot_tokens=10**6, prune_above=1)).hot == VOCABULARY


def test_no_more_steps_are_built_than_were_trained() -> None:
    assert lyanna_shape(CONFIG, LyannaBuild(steps=CONFIG.steps)).steps == CONFIG.steps
    with pytest.raises(
        CheckpointError, match=f"drafter was trained for {CONFIG.steps} steps, not {CONFIG.steps + 1}; build"
    ):
        lyanna_shape(CONFIG, LyannaBuild(steps=CONFIG.steps + 1))
