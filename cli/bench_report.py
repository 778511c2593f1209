"""The part of `redraft bench` that writes a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.bench.report import Study
    from redraft.engines.manifest import Manifest
    from redraft.runtime import Runtime

Draw = Callable[[Mapping[str, Any], str, Path], dict[str, list[Path]]]
"""Draws a report's pictures under a title into a folder. Returns the files by the picture's name."""


@dataclass(frozen=True)
class ReportOptions:
    """The options of `redraft bench` that belong to a report.

    folder:      of the report; None for no report.   trained: folders of `redraft train all`.
    chains:      engines for the figures by depth.    baseline: the drafter that others are compared with.
    controllers: JSON of a comparison of controllers.   peers: JSON of `redraft.bench.peers`.
    latency:     JSON of `experiments.lyanna latency`.
    """

    folder: Path | None = None
    trained: Sequence[Path] = ()
    chains: Path | None = None
    baseline: str | None = None
    controllers: Path | None = None
    peers: Path | None = None
    latency: Path | None = None

    def read(self, contradicting: object) -> dict[str, Any]:
        """Return what other commands measured, by the name of the report's part; nothing without a report.

        contradicting: any option that a report cannot have. Raises UsageError for options that do not go together, for
        missing libraries, for a folder that cannot be written, and for files of something else.
        """
        if self.folder is None:
            if option := self._option:
                raise UsageError(f"{option} belongs to --report", "give --report DIR, or leave it out")
            return {}
        if contradicting:
            raise UsageError(
                "--report measures temperatures 0 and 1, and takes no --temperature, --sampling, --controllers, "
                "--synthetic-acceptance or --inexact",
                "leave them out",
            )
        from redraft.bench.report_inputs import read_controllers, read_latency, read_peers, trained

        self._open()
        return {
            "trained": trained(self.trained),
            "controllers": read_controllers(self.controllers) if self.controllers else None,
            "peers": read_peers(self.peers) if self.peers else None,
            "latency": read_latency(self.latency) if self.latency else None,
        }

    def read_load(self) -> dict[str, Any]:
        """Return nothing, since a report of load measurements has no other parts. Raises UsageError as `read`."""
        if option := self._option:
            raise UsageError(f"{option} belongs to a report without --batch", "leave one of the two out")
        if self.folder is not None:
            self._open()
        return {}

    @property
    def _option(self) -> str | None:
        """The first option of a report that is given, apart from the folder."""
        given = {"--trained": self.trained, "--chains": self.chains, "--baseline": self.baseline,
                 "--controllers-json": self.controllers, "--peers": self.peers,
                 "--latency-json": self.latency}  # fmt: skip
        return next((name for name, value in given.items() if value), None)

    def _open(self) -> None:
        """Make the folder. Raises UsageError if that fails, or for missing libraries."""
        from redraft.bench.report import check_report

        assert self.folder is not None
        check_report()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write to {self.folder}: {error.strerror}", "give another folder") from None


def drafting_methods(listed: Sequence[str], runtime: Runtime) -> list[str]:
    """Return the methods to compare: `all` means every one of the bundle but plain decoding and pairs."""
    if list(listed) != ["all"]:
        return list(listed)
    from redraft.bench.compare import PLAIN

    return [name for name in runtime.methods if name != PLAIN and "+" not in name]


def check_same_model(engines: Manifest, chains: Manifest) -> None:
    """Raise UsageError if the engines for the figures by depth are of another model than those that are measured."""
    if engines.model.weights != chains.model.weights or engines.precisions != chains.precisions:
        raise UsageError(
            f"--chains has engines of another model or precision: {chains.name} in {chains.precisions}, expected "
            f"{engines.name} in {engines.precisions}",
            "build the same model with drafters of width=1",
        )


def write_report(
    study: Study, about: dict[str, Any], other: dict[str, Any], folder: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure, and write report.json, the pictures and report.html. Returns the figures with the files' paths.

    about: the environment and settings, as `redraft bench --json` has them.   other: of `ReportOptions.read`.
    """
    from redraft.bench.compare import INEXACT, PLAIN
    from redraft.bench.report_page import draw

    drafting = [name for name in study.methods if name != PLAIN]
    if INEXACT in drafting:
        raise UsageError("a report has no inexact decoding", f"leave {INEXACT} out of --methods")
    if not drafting:
        raise UsageError("a report needs a drafting method", "give --methods all, or drafters of the bundle")
    settings = study.settings
    report = {
        **about,
        "command": shlex.join(["redraft", *_shown(sys.argv[1:])]),
        "prompts": len(study.prompts),
        "controller": settings.controller or ("fixed" if settings.budget else "adaptive"),
        "budget": asdict(settings.budget) if settings.budget else None,
        **replace(study, methods=drafting).measure(progress),
        **other,
    }
    return _write(report, draw, folder)


def write_load_report(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write report.json, the pictures and report.html of load measurements. Returns the figures with the paths."""
    from redraft.bench.report_page import LOAD_TEMPLATE, draw_load

    report = {**result, "command": shlex.join(["redraft", *_shown(sys.argv[1:])])}
    return _write(report, draw_load, folder, LOAD_TEMPLATE)


def _write(report: dict[str, Any], draw: Draw, folder: Path, *template: str) -> dict[str, Any]:
    from redraft.bench.report_page import FIGURES, write_page

    model, figures = report["environment"]["model"], folder / FIGURES
    figures.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")  # first, since measuring takes long
    pictures = draw(report, f"{model['name']} {model['precision']}", folder)
    page = write_page(report, pictures, folder, *template)
    return {**report, "files": list(map(str, [page, figures, *(path for some in pictures.values() for path in some)]))}


def _shown(arguments: Sequence[str]) -> list[str]:
    """Return arguments with files by their names alone: a report may be published, folders of a machine should not."""
    return [Path(one).name if Path(one).is_absolute() else one for one in arguments]
