"""Pages for users: links lead somewhere, Python examples run, and the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = ("*.md", "docs/**/*.md", "plugins/*.md", "examples/*.md")
EXAMPLES = ("README.md", "docs/embedding.md", "docs/sampling.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
README_LINES = 150


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page without a file, or without a heading in it."""
    broken = []
    for link in LINK.findall(BLOCK.sub("", page.read_text("utf-8"))):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not link.startswith("http") and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    return broken


def test_every_link_of_the_pages_resolves(root: Path) -> None:
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern))]
    assert {"README.md", "CONTRIBUTING.md", "building.md"} <= {page.name for page in pages}
    assert {str(page.relative_to(root)): broken for page in pages if (broken := broken_links(page))} == {}


@pytest.mark.parametrize("link", ["other.md", "page.md#gone", "#gone"])
def test_a_broken_link_is_found(tmp_path: Path, link: str) -> None:
    (tmp_path / "page.md").write_text(f"# Here\n\n[right](#here) [wrong]({link}) [far](https://example.org)\n")
    assert broken_links(tmp_path / "page.md") == [link]


def unknown_names(row: str, root: Path) -> list[str]:
    """Files of a table's row that do not exist, and names after a file that none of the row's files define."""
    words = re.findall(r"`([^`]+)`", row)
    files = [word for word in words if re.fullmatch(r"[\w/]+\.py", word)]
    found = [
        next((path for path in (root / file, (root / files[0]).parent / file) if path.exists()), None) for file in files
    ]
    source = "\n".join(path.read_text("utf-8") for path in found if path)
    unknown = [file for file, path in zip(files, found, strict=True) if path is None]
    after = words[words.index(files[0]) :] if files else []
    for name in (word for word in after if re.fullmatch(r"[A-Za-z_][\w.]*", word) and word not in files):
        if any(not re.search(rf"^ *(?:def|class) {part}\b|^ *{part} *[:=]", source, re.M) for part in name.split(".")):
            unknown.append(name)
    return unknown


def test_methods_name_code_that_exists(root: Path) -> None:
    rows = [line for line in (root / "docs/methods.md").read_text("utf-8").splitlines() if line.startswith("|")]
    assert sum(".py`" in row for row in rows) > 60
    assert {name: row for row in rows for name in unknown_names(row, root)} == {}


def test_a_name_that_no_file_of_a_row_defines_is_found(root: Path) -> None:
    row = "| a | `tests/test_docs.py` `unknown_names`, `BLOCK`; `conftest.py` `ROOT`, `Cycle.make`, `gone.py` |"
    assert unknown_names(row, root) == ["gone.py", "Cycle.make"]


def test_the_readme_is_short_and_links_to_every_page(root: Path) -> None:
    index = (root / "docs/README.md").read_text("utf-8")
    assert len((root / "README.md").read_text("utf-8").splitlines()) < README_LINES
    names = {page.name for page in root.glob("docs/*.md")} - {"README.md"}
    assert {name for name in names if f"]({name}" not in index} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_python_examples_run(root: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They open build/engines/tiny, which the README builds."""
    monkeypatch.chdir(tiny_bundle.parents[2])
    codes = [code for language, code in BLOCK.findall((root / name).read_text("utf-8")) if language == "python"]
    assert codes
    for code in codes:
        exec(compile(code, name, "exec"), {})
