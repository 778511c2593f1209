"""Fixtures for every test: the project's root, and the reference data next to it."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
from filelock import FileLock

from redraft.plugins.library import CPU_LIBRARY, Kernels
from redraft.plugins.operators import OPERATORS_LIBRARY, OPERATORS_VARIABLE, Operators, find_operators
from tests.little import Redraft, write_checkpoint
from tests.plugins.builds import built

# PyTorch's threads wait for each other by spinning. If another process needs a core, that takes twenty times as long as
# sleeping. Read when PyTorch is imported, by this process and by commands that tests run.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "redraft": "redraft",
    "assembly": "redraft/assembly",
    "assets/tiny/heldout": "redraft/assembly/heldout",
    "bench": "redraft/bench",
    "bench/peers": "redraft/bench/peers",
    "cli": "redraft/cli",
    "cli/optimum": "optimum/commands/register",
    "engines": "redraft/engines",
    "export": "redraft/export",
    "plugins": "redraft/plugins",
    "runtime": "redraft/runtime",
    "train": "redraft/train",
}
"""Folders of the sources and their names in the wheel."""


Once = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that all processes end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Write a folder once in a whole run, in the process that asks first; for reading only.

    `once(write, *arguments, **options)` returns a folder that `write(folder, *arguments, **options)` filled. Calls with
    equal arguments share it.
    """
    base = tmp_path_factory.getbasetemp()
    written = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    written.mkdir(exist_ok=True)

    def call(write: Callable[..., object], *arguments: object, **options: object) -> Path:
        key = f"{write.__module__}.{write.__qualname__} {arguments!r} {sorted(options.items())!r}"
        folder = written / f"{write.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        finished = folder.with_suffix(".finished")
        with FileLock(folder.with_suffix(".lock")):
            if not finished.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                write(folder, *arguments, **options)
                finished.touch()
        return folder

    return call


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference data next to the project. Skips the test if they are absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared beside the project: reference checkpoints and prompts are not here")
    return folder


@pytest.fixture(scope="session")
def wheel(once: Once) -> Path:
    """A wheel of the sources, built without a compiler."""
    return next(once(build_wheel, "none").glob("*.whl"))


def build_wheel(folder: Path, compiler: str) -> None:
    """Write a wheel of the sources, built with a C++ compiler if this is one."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, env={**os.environ, "CXX": compiler}, check=True, capture_output=True)


@pytest.fixture(scope="session")
def lyanna_bundle(once: Once) -> Path:
    """A bundle with a random drafter, for reading only."""
    from tests.runtime.lyanna_bundle import write_lyanna_bundle

    return once(write_lyanna_bundle) / "engines"


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The kernels built for the CPU by `make kernels-cpu`. Skips only if no C++ compiler can build them."""
    return Kernels(built(CPU_LIBRARY))


@pytest.fixture(scope="session")
def operators_library() -> Operators:
    """The operators built by `make operators`. Skips only if no C++ compiler can build them."""
    found = find_operators({OPERATORS_VARIABLE: str(built(OPERATORS_LIBRARY))})
    assert found is not None
    return found


@pytest.fixture(scope="session", autouse=True)
def cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache folder of all tests and of commands that they run: no test writes to the real one."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as a user without a home folder."""

    def unknown(user: int) -> pwd.struct_passwd:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def redraft(cache_of_tests: Path) -> Redraft:
    """Run the command line in this process, which has imported PyTorch already; returns what a process would."""
    from redraft.cli import main

    def run(*words: object, input: str | bytes = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        arguments, out, err = [*map(str, words)], StringIO(), StringIO()
        given = BytesIO(input if isinstance(input, bytes) else input.encode())
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("COLUMNS", "200")
            patch.delenv("REDRAFT_DEBUG", raising=False)
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
            patch.setattr("sys.argv", ["-c", *arguments])
            patch.setattr("sys.stdin", TextIOWrapper(given, "utf-8"))
            stack.enter_context(chdir(cwd or Path.cwd()))
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            status = main.run(arguments)
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def checkpoint(once: Once) -> Path:
    """A checkpoint, for reading only."""
    return once(_write_little) / "little"


def _write_little(folder: Path) -> None:
    write_checkpoint(folder / "little")


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, once: Once) -> Path:
    """A bundle of `checkpoint`, for reading only."""
    return once(_build_little, checkpoint) / "little"


def _build_little(folder: Path, checkpoint: Path) -> None:
    from redraft.assembly.bundle import build_bundle
    from redraft.assembly.models import Model
    from redraft.config import BuildConfig

    build_bundle(Model("little", str(checkpoint), checkpoint), BuildConfig(), folder / "little")


@pytest.fixture(scope="session")
def tiny_bundle(once: Once) -> Path:
    """The embedded model in fp32 with its own drafter and its MTP module, which is called `fast`; for reading only."""
    return once(_build_tiny) / "build/engines/tiny"


def _build_tiny(folder: Path) -> None:
    from redraft.assembly.bundle import build_bundles
    from redraft.assembly.options import BuildRequest

    drafters = ("lyanna", f"fast={ROOT / 'assets/tiny/mtp'},steps=3")
    request = BuildRequest("tiny", folder / "build/engines/tiny", drafters=drafters, texts={}, check=False)
    build_bundles(request, lambda message: None)
