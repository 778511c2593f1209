"""No shared file contains a drafting method's name: all work from its specification."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from redraft.methods import METHODS, NGRAM, NONE

FOLDERS = ("assembly", "bench", "cli", "engines", "export", "plugins", "redraft", "runtime", "train")
REGISTRY = "redraft/methods/__init__.py"
WORDS = tuple(name for name in METHODS if name not in (NONE, NGRAM))
"""The methods that the test searches for.

`none` is too common a word. N-gram lookup is not a drafter of a bundle: shared files combine it with drafters.
"""
ORDINARY = frozenset({"lookahead", "suffix"})
"""Methods with the name of an ordinary word. Shared files may use it as an identifier, but not import the method's
modules, and no string of theirs may have the id alone or joined to others.
"""
PUBLISHED = {"export/drafters/published.py": "recognises published layouts by their method"}
EXCEPTIONS = {
    "draft_model": dict.fromkeys(
        ("bench/peers/llamacpp.py", "bench/peers/openvino.py"), "calls a peer that has an argument of this name"
    ),
    "dflash": {"export/drafters/published_block.py": "reads a key of published configurations"},
    "eagle": PUBLISHED,
    "eagle2": PUBLISHED,
    "eagle3": PUBLISHED,
    "hass": PUBLISHED,
    "mtp": dict.fromkeys(
        (
            "export/checkpoint/safetensors.py", "train/drafter_config.py", "train/mtp.py",
            "train/objectives/lyanna.py",
        ),
        "trains, stores or begins with the module that a verifier may have, whatever drafts with it",
    ),
    "suffix": dict.fromkeys(
        ("runtime/server/endpoints.py", "runtime/server/prompts.py"), "OpenAI's completions have a field of this name"
    ),
}  # fmt: skip
"""By method, shared files that still name it, and why. Add none for a new method."""


def own_files(method: str) -> re.Pattern[str]:
    """The files that belong to a method."""
    name = re.escape(method)
    return re.compile(
        rf"redraft/methods/{name}(_\w+)?\.py|export/drafters/{name}(_\w+)?\.py|train/objectives/{name}(_\w+)?\.py"
        rf"|runtime/drafters/{name}(_\w+)?\.py"
    )


def docstrings(tree: ast.Module) -> set[ast.Constant]:
    """Docstrings, which may cite a paper and name a method as an example."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def words_of(identifier: str) -> set[str]:
    """Return the words of an identifier in snake or camel case, or of a string, in lower case.

    Digits after a word belong to it only if a method has that name: `eagle2` does not name `eagle`.
    """
    words = [word.lower() for word in re.findall(r"(?:[A-Z]+(?![a-z])|[A-Z]?[a-z]+)(?:-?[0-9]+)?|[0-9]+", identifier)]
    joined = {word.replace("-", "") for word in words} & set(METHODS)
    return joined | {word.rstrip("-0123456789") for word in words if word.replace("-", "") not in joined}


def names_method(node: ast.AST, method: str) -> bool:
    """Return True if an identifier, an import or a string has the method's name among its words."""
    fields = ("id", "attr", "arg", "name", "asname", "module", "value")
    found = [value for field in fields if isinstance(value := getattr(node, field, None), str)]
    return any(method in words_of(name) or name.lower() == method for name in found)


def names_ordinary(node: ast.AST, method: str) -> bool:
    """Return True for an import of the method's modules, and for its id as a string, alone or in a pair or a path."""
    if isinstance(node, ast.ImportFrom):
        found = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        return any(re.search(rf"\.{method}(_|\.|$)", name) for name in found)
    if isinstance(node, ast.alias):
        return re.search(rf"\.{method}(_|\.|$)", node.name) is not None
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and method in re.split(r"[+.=,]", node.value)


def uses(source: str, method: str, ordinary: bool = False) -> set[int]:
    """Return lines of a source that name the method, whose name may be an ordinary word."""
    tree = ast.parse(source)
    documented = docstrings(tree)
    named = names_ordinary if ordinary else names_method
    return {getattr(node, "lineno", 0) for node in ast.walk(tree) if node not in documented and named(node, method)}


def letters(text: str) -> str:
    """Return a text without case and without what joins words."""
    return re.sub("[^a-z0-9]", "", text.lower())


@cache
def shared_files(root: Path) -> dict[str, tuple[str, str]]:
    """Each file's source and its letters."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    sources = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in paths}
    return {name: (source, letters(source)) for name, source in sources.items() if name != REGISTRY}


def found_in(root: Path, method: str) -> dict[str, int]:
    """Shared files that use a method's name, with the first line of each."""
    own, found = own_files(method), {}
    for name, (source, short) in shared_files(root).items():
        mentioned = letters(method) in short and not own.fullmatch(name)  # parsing takes much longer
        if mentioned and (lines := uses(source, method, method in ORDINARY)):
            found[name] = min(lines)
    return found


@pytest.mark.parametrize("method", WORDS)
def test_no_shared_file_names_a_method(root: Path, method: str) -> None:
    found = found_in(root, method)
    new = {name: line for name, line in found.items() if name not in EXCEPTIONS.get(method, {})}
    assert not new, f"these files name the method {method!r} (file: line): {new}"
    gone = sorted(set(EXCEPTIONS.get(method, {})) - set(found))
    assert not gone, f"take these out of EXCEPTIONS, they name no method any more: {gone}"


@pytest.mark.parametrize(
    "source",
    [
        "import redraft.methods.eagle",
        "from redraft.methods import eagle as method",
        "from redraft.methods.eagle import METHOD",
        "def f(eagle): pass",
        "class EagleDrafter: pass",
        "x.eagle = 1",
        "f(eagle=1)",
        "EAGLE = 1",
        "x = 'eagle'",
        "x = 'EAGLE-9 drafts'",
        "x = f'{y}.eagle.draft'",
    ],
)
def test_each_kind_of_use_is_seen(source: str) -> None:
    assert uses(source, "eagle") == {1}


@pytest.mark.parametrize(
    "source",
    [
        "from redraft.methods.eagle2 import METHOD",
        "class Eagle2Drafter: pass",
        "x = f'{y}.eagle2.draft'",
        "x = 'EAGLE-2 drafts'",
        "EAGLE2 = 1",
    ],
)
def test_digits_of_a_methods_name_belong_to_it(source: str) -> None:
    assert (uses(source, "eagle2"), uses(source, "eagle")) == ({1}, set())


@pytest.mark.parametrize("source", ["x.interest = 1", "x = 'the restored state'", "def arrest(): pass"])
def test_a_name_within_another_word_is_no_use(source: str) -> None:
    assert uses(source, "rest") == set()


@pytest.mark.parametrize(
    "source",
    [
        "import redraft.methods.suffix",
        "from redraft.methods import suffix as method",
        "from redraft.runtime.drafters.suffix_tree import SuffixStore",
        "x = 'suffix'",
        "x = f'suffix+{y}'",
        "x = {'suffix.max': 1}",
    ],
)
def test_each_use_of_an_ordinary_name_is_seen(source: str) -> None:
    assert uses(source, "suffix", ordinary=True) == {1}


@pytest.mark.parametrize("source", ["x.suffix = 1", "def f(suffix): pass", "x = 'no suffix of the file'"])
def test_an_ordinary_name_may_be_an_identifier(source: str) -> None:
    assert uses(source, "suffix", ordinary=True) == set()


def test_documentation_may_name_a_method() -> None:
    assert uses('"""As in EAGLE."""\nx = 1\n"""What eagle does with it."""\n', "eagle") == set()
