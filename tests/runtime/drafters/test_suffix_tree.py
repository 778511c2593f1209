"""The suffix tree equals a search through all texts, while texts grow and are removed."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from redraft.runtime.drafters.suffix_tree import LATEST, LEAF_PLACES, SuffixStore, SuffixTree


def searched(texts: dict[int, list[int]], tokens: list[int], depth: int) -> dict[int, list[tuple[int, int]]]:
    """Return places after tokens that agree with the latest `tokens`, by exact length of agreement, by brute force."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, text in texts.items():
        for index in range(1, len(text)):
            length = 0
            while length < min(depth, index, len(tokens)) and text[index - 1 - length] == tokens[-1 - length]:
                length += 1
            found.setdefault(length, []).append((number, index))
    found.pop(0, None)
    return found


def places(tree: SuffixTree, tokens: list[int]) -> dict[int, list[tuple[int, int]]]:
    index = (1 << 32) - 1
    return {match.length: [(place >> 32, place & index) for place in match.places] for match in tree.matches(tokens)}


def check(tree: SuffixTree, texts: dict[int, list[int]], tokens: list[int], depth: int) -> None:
    """The longest context is found, and every match has its latest places, at least LATEST of them."""
    expected, found = searched(texts, tokens, depth), places(tree, tokens)
    assert max(found, default=0) == max(expected, default=0)
    assert list(found) == sorted(found, reverse=True)
    for length, got in found.items():
        every = sorted(place for agrees, some in expected.items() if agrees >= length for place in some)
        assert got == every[-len(got) :]
        assert len(got) >= min(len(every), LATEST)


@pytest.mark.parametrize(("letters", "depth"), [(2, 7), (2, 23), (5, 4), (60, 23)])
def test_matches_are_those_of_a_search(letters: int, depth: int) -> None:
    rng = random.Random(letters)
    tree = SuffixTree(depth)
    texts: dict[int, list[int]] = {}
    for number in range(4):
        texts[number] = []
        for _ in range(60):
            start = len(texts[number])
            texts[number] += [rng.randrange(letters) for _ in range(rng.randint(1, 5))]
            tree.add(number, texts[number], start)
            check(tree, texts, texts[number], depth)
            check(tree, texts, [rng.randrange(letters) for _ in range(depth)], depth)


def test_removed_texts_have_no_matches() -> None:
    rng = random.Random(1)
    tree = SuffixTree(9)
    texts: dict[int, list[int]] = {}
    for number in range(30):
        texts[number] = [rng.randrange(3) for _ in range(40)]
        tree.add(number, texts[number], 1)
        if number >= 4:
            texts.pop(number - 4)
            tree.remove(number - 4, 1)
        for _ in range(5):
            tokens = [rng.randrange(3) for _ in range(12)]
            found = places(tree, tokens)
            assert {number for some in found.values() for number, _ in some} <= set(texts)
            assert max(found, default=0) == max(searched(texts, tokens, 9), default=0)
    for number in list(texts):
        tree.remove(number, 1)
    assert not tree.matches([0, 1, 2])
    assert not tree._root.places
    assert not tree._root.children


def test_memory_a_token_is_bounded_when_texts_recur() -> None:
    """Nodes that were split for many copies of a text are joined again when most copies are gone."""
    rng = random.Random(3)
    texts = [tuple(rng.randrange(50_000) for _ in range(100)) for _ in range(12)]
    tracemalloc.start()
    store, before = SuffixStore(10**6, 40 * 101, 23), tracemalloc.get_traced_memory()[0]
    for recent in range(len(texts)):
        for text in (*[texts[recent]] * 30, *texts[:recent]):
            store.add("one", (1,), text)
        assert (tracemalloc.get_traced_memory()[0] - before) / store.tokens < 350
    for text in texts * 4:
        store.add("one", (1,), text)
    assert (tracemalloc.get_traced_memory()[0] - before) / store.tokens < 200
    tracemalloc.stop()


def test_a_text_of_one_token_does_not_grow_without_bound() -> None:
    """Every context occurs at every place, and each node keeps the latest places."""
    tree = SuffixTree(5)
    text = [7] * 5000
    tree.add(0, text, 0)
    matches = tree.matches(text)
    assert matches[0].length == 5
    assert all(len(match.places) < 2 * LATEST and match.places[-1] == 4999 for match in matches)


def test_tokens_after_a_place_end_with_its_text() -> None:
    tree = SuffixTree(5)
    tree.add(3, list(range(100, 130)), 1)
    (match, *_) = tree.matches([126, 127])
    assert tree.following(match.places[-1], 9) == [128, 129]
    assert LEAF_PLACES < 30  # the tree was split
