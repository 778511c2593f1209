"""Checks of `redraft doctor --engines`: exactness of a bundle's texts on this machine, and costs of verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redraft.bench.environment import processor_name
from redraft.cli.console import Finding
from redraft.runtime import Runtime
from redraft.runtime.controllers.cost import CostCurve
from redraft.runtime.steps.exactness import measure_exactness
from redraft.runtime.steps.measurements import SIZES

CostsMs = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Milliseconds by `measured` or `believed`, sequences, and nodes of a tree."""


@dataclass(frozen=True)
class BundleFindings:
    """Exactness and costs of a bundle on this machine.

    exactness: True if logits depend on a sequence's own tokens only.
    costs_ms:  costs of a verification.
    """

    exactness: Finding
    costs_ms: CostsMs

    def table(self) -> str:
        """Return the costs, a line for each size of a tree."""
        measured, believed = self.costs_ms["measured"], self.costs_ms["believed"]
        lines = ["", "milliseconds of a verification, measured at the first opening and currently estimated", ""]
        names = [f"{n} sequence{'s' if n != '1' else ''}" for n in measured]
        lines.append("nodes   " + "".join(f"{name:>22s}" for name in names))
        for nodes in next(iter(measured.values())):
            cells = [f"{measured[n][nodes]:10.2f} {believed[n][nodes]:10.2f} " for n in measured]
            lines.append(f"{nodes:>5s}   " + "".join(cells))
        return "\n".join([*lines, ""])


def examine_engines(engines: Path, max_num_seqs: int, verify: bool | None = None) -> BundleFindings:
    """Open the bundle, as `Runtime.open` does with `verify`, and check it.

    Raises BundleError and BackendError if it does not open.
    """
    with Runtime.open(engines, max_num_seqs=max_num_seqs, verify=verify) as runtime:
        costs = {
            "measured": _by_size(runtime.costs.measured),
            "believed": _by_size(runtime.costs.estimated),
        }
        return BundleFindings(_exactness(runtime), costs)


def _exactness(runtime: Runtime) -> Finding:
    verifier = runtime.verifier
    if not runtime.exact:
        return Finding("exact texts", "absent", "not compared on a GPU")
    verifier.take_branches()
    found = measure_exactness(verifier)
    if found.holds:
        rows = (
            ""
            if verifier.steps.fewest_rows == 1
            else "; a single row is computed as two, since its kernel rounds otherwise"
        )
        return Finding(
            "exact texts", "ok", f"{found.compared} logits agree to the bit, however they are computed{rows}"
        )
    worst = ", ".join(f"{name} by up to {difference:.1g}" for name, difference in found.differences.items())
    hint = "texts may differ if two tokens are nearly as likely (`redraft bench` names such places)"
    return Finding("exact texts", "warning", f"kernels of {processor_name()} round otherwise for {worst}", hint)


def _by_size(curves: Mapping[int, CostCurve]) -> dict[str, dict[str, float]]:
    return {
        str(sequences): {str(n): round(curve.table_ms[n], 3) for n in SIZES if n <= curve.largest}
        for sequences, curve in curves.items()
    }
