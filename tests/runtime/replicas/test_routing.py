"""The choice of a replica by prefix, load and session."""

from __future__ import annotations

from redraft.runtime.replicas.routing import BLOCK, MOST_OWNERS, OVERLOAD, PrefixTable

FIRST, SECOND = list(range(2 * BLOCK)), list(range(5, 2 * BLOCK + 5))
IDLE = {"a": 0, "b": 0}


def test_a_conversation_goes_back_to_the_replica_that_has_its_rows() -> None:
    table = PrefixTable()
    table.note(FIRST, "b")
    table.note(SECOND, "a")
    assert table.order([*FIRST, 7, 8, 9], IDLE)[0] == "b"
    assert table.order([*SECOND, 7], {"a": 2, "b": 0})[0] == "a"


def test_the_longest_prefix_counts() -> None:
    table = PrefixTable()
    table.note([*FIRST, *range(BLOCK)], "a")
    table.note(FIRST, "b")
    assert table.order([*FIRST, *range(BLOCK), 1], IDLE)[0] == "a"
    assert table.order([*FIRST, *range(1, BLOCK + 1)], {"a": 1, "b": 0})[0] == "b"


def test_a_beginning_that_several_have_goes_to_the_idlest_of_them() -> None:
    table = PrefixTable()
    table.note(FIRST, "a")
    table.note([*FIRST, *range(BLOCK)], "b")
    assert table.order([*FIRST, 7], {"a": 1, "b": 2, "c": 0}) == ["a", "b", "c"]
    assert table.order([*FIRST, *range(BLOCK), 7], {"a": 1, "b": 2, "c": 0})[0] == "b"
    for number in range(MOST_OWNERS):
        table.note(FIRST, str(number))
    assert table.order(FIRST, {"a": 1, "c": 0})[0] == "c"  # forgotten


def test_an_overloaded_replica_is_left_to_others() -> None:
    table = PrefixTable()
    table.note(FIRST, "a")
    assert table.order(FIRST, {"a": OVERLOAD, "b": 0})[0] == "a"
    assert table.order(FIRST, {"a": OVERLOAD + 1, "b": 0})[0] == "b"


def test_a_prompt_that_nobody_knows_goes_to_the_idlest() -> None:
    table = PrefixTable()
    table.note(FIRST, "a")
    assert table.order(SECOND, {"a": 3, "b": 2, "c": 1}) == ["c", "b", "a"]
    assert table.order(FIRST[: BLOCK - 1], {"a": 1, "b": 0})[0] == "b"  # less than a block


def test_a_session_stays_where_it_is_also_under_load() -> None:
    table = PrefixTable()
    table.note(FIRST, "a", session="s")
    assert table.order(SECOND, {"a": 99, "b": 0}, session="s")[0] == "a"
    assert table.order(SECOND, {"a": 99, "b": 0}, session="t")[0] == "b"
    assert table.order(SECOND, {"b": 0, "c": 1}, session="s") == ["b", "c"]  # its replica is gone


def test_other_salts_share_no_prefix() -> None:
    table = PrefixTable()
    table.note(FIRST, "a", salt="x")
    assert table.order(FIRST, {"a": 1, "b": 0}, salt="y")[0] == "b"
    assert table.order(FIRST, {"a": 1, "b": 0}, salt="x")[0] == "a"


def test_a_replica_that_is_gone_has_no_rows() -> None:
    table = PrefixTable()
    table.note([*FIRST, *range(BLOCK)], "a")
    table.note(FIRST, "b")
    assert table.order([*FIRST, *range(BLOCK)], {"b": 1, "c": 0})[0] == "b"


def test_the_oldest_blocks_are_forgotten() -> None:
    table = PrefixTable(most_blocks=4)
    table.note(FIRST, "a")
    table.note(SECOND, "a")
    table.note([9] * BLOCK, "a")
    loads = {"a": 1, "b": 0}
    assert [table.order(prompt, loads)[0] for prompt in (SECOND, [9] * BLOCK)] == ["a", "a"]
    assert table.order(FIRST, loads)[0] == "a"  # its first block is known
    table.note([8] * BLOCK, "a")
    assert table.order(FIRST, loads)[0] == "b"
