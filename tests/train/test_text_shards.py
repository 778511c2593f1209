"""Shards of written texts on disk."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.errors import DataError, UsageError
from redraft.train.text_shards import (
    PACKED,
    SHARDS,
    Shards,
    load_facts,
    load_packed,
    pack,
    save_facts,
    save_packed,
)

ARRAYS = {
    "tokens": np.array([1, 2, 3, 70000], np.uint32),
    "lengths": np.array([3, 1]),
    "prompts": np.array([1, 1]),
    "kinds": np.array(["chat", "math"]),
    "temperatures": np.array([0.0, 1.0], np.float32),
}


def test_an_interrupted_shard_is_not_there(tmp_path, monkeypatch):
    shards, honest, calls = Shards(tmp_path), np.save, []

    def torn(path, array):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        honest(path, array)

    monkeypatch.setattr(np, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        shards.add(0, ARRAYS)
    assert 0 not in shards
    assert not list(shards)
    monkeypatch.undo()
    shards.add(0, ARRAYS)
    assert 0 in shards
    (found,) = shards
    assert found.array("tokens").tolist() == ARRAYS["tokens"].tolist()
    assert "hidden8.last" not in found


def test_packing_keeps_tokens_and_facts_and_is_the_same_at_any_time(tmp_path):
    Shards(tmp_path).add(0, {**ARRAYS, "log_sum": np.zeros(4, np.float32)})
    Shards(tmp_path).add(1, ARRAYS)
    with pytest.raises(DataError, match=r"text\.json is missing or damaged"):
        pack(tmp_path, tmp_path / "a")
    save_facts(tmp_path, {"seed": 3})
    pack(tmp_path, tmp_path / "a")
    pack(tmp_path, tmp_path / "b")
    assert (tmp_path / "a" / PACKED).read_bytes() == (tmp_path / "b" / PACKED).read_bytes()
    assert load_facts(tmp_path / "a") == {"seed": 3}
    found = load_packed(tmp_path / "a" / PACKED)
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].tolist() == [*array.tolist(), *array.tolist()]
    with pytest.raises(UsageError, match="has no texts"):
        pack(tmp_path / "absent", tmp_path / "c")


def test_damaged_files_are_named(tmp_path):
    save_packed(tmp_path / PACKED, ARRAYS)
    whole = (tmp_path / PACKED).read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"PK" + bytes(100)):
        (tmp_path / PACKED).write_bytes(content)
        with pytest.raises(DataError, match=r"texts\.npz is damaged"):
            load_packed(tmp_path / PACKED)
    Shards(tmp_path).add(0, ARRAYS)
    (tmp_path / SHARDS / "0000" / "tokens.npy").write_bytes(b"x")
    (shard,) = Shards(tmp_path)
    with pytest.raises(DataError, match=r"tokens\.npy is damaged"):
        shard.array("tokens")
