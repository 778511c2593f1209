"""Corpora and their split."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.errors import DataError
from redraft.train.data import is_held_out, load_corpus, parse_sources


def test_split_is_deterministic_disjoint_and_whole(sources):
    """A document on both sides would invalidate every held-out figure."""
    for kind, source in sources.items():
        first, second = load_corpus(kind, source, 3), load_corpus(kind, source, 3)
        assert first.digest() == second.digest()
        train, held_out = {d.name for d in first.train}, {d.name for d in first.held_out}
        assert train
        assert held_out
        assert not train & held_out
        assert not {d.text for d in first.train} & {d.text for d in first.held_out}


def test_split_does_not_depend_on_the_other_documents(tmp_path, sources):
    """A new book must not move another one from held-out to training. The digest sees it."""
    text = Path(sources["prose"]).read_text(encoding="utf-8")
    longer = tmp_path / "longer.txt"
    longer.write_text("# Title: New\n\n## Author: New\n\nnew\n<|endoftext|>\n" + text, encoding="utf-8")
    before, after = (load_corpus("prose", source, 3) for source in (sources["prose"], str(longer)))
    held_out = [{d.text for d in corpus.held_out if d.name != "New, New"} for corpus in (before, after)]
    assert held_out[0] == held_out[1]
    assert before.digest() != after.digest()


def test_word_problems_are_formatted_without_annotations(sources):
    documents = load_corpus("word_problems", sources["word_problems"], 3).train
    assert all(d.text.startswith("Question: ") and "\nAnswer: " in d.text for d in documents)
    assert not any("<<" in d.text for d in documents)


def test_stdlib_is_the_library_without_its_tests(tmp_path, monkeypatch):
    monkeypatch.setattr("redraft.train.data.sysconfig.get_path", lambda name: str(tmp_path / name))
    kept = [f"json/module{i}.py" for i in range(30)]
    left_out = ["test/a.py", "json/tests/b.py", "site-packages/c.py", "encodings/d.py", "_sysconfigdata_x.py", "e.txt"]
    for name in (*kept, *left_out):
        (tmp_path / "stdlib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stdlib" / name).write_text(f"# {name}\n" * 10)
    (tmp_path / "stdlib" / "latin.py").write_bytes("# caf\xe9".encode("latin-1"))
    (tmp_path / "stdlib" / "empty.py").touch()
    corpus = load_corpus("code", "stdlib", 3)
    assert {d.name for d in (*corpus.train, *corpus.held_out)} == set(kept)
    assert all(is_held_out("code", d.name, 3) for d in corpus.held_out)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "fewer than"),
        ("short.txt", b"too short", "fewer than"),
        ("latin.txt", "caf\xe9 ".encode("latin-1") * 1000, "not UTF-8"),
        ("items.jsonl", b'{"question": "only"}\n' * 200, "items.jsonl:1"),
        ("broken.jsonl", b'{"question": \n' * 200, "broken.jsonl:1"),
    ],
)
def test_bad_corpus_names_the_file(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        load_corpus("prose", str(path), 3)
    assert name in str(raised.value)


def test_missing_corpus_and_one_document_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no corpus file .*absent\.txt"):
        load_corpus("prose", str(tmp_path / "absent.txt"), 3)
    single = tmp_path / "single.txt"
    single.write_text("word " * 1000, encoding="utf-8")
    with pytest.raises(DataError, match="leave"):
        load_corpus("prose", str(single), 3)


@pytest.mark.parametrize("options", [["code"], ["=x"], ["code="], ["code=a", "code=b"]])
def test_data_options_of_another_form_are_refused(options):
    with pytest.raises(DataError, match="--data"):
        parse_sources(options)
