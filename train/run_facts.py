"""The facts of a drafter's run, which its folder keeps as run.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redraft.errors import TrainingError, UsageError
from redraft.export.drafters.checkpoint import Identity
from redraft.records import from_plain

RUN = "run.json"


@dataclass(frozen=True)
class RunFacts:
    """The verifier, data and settings that a run belongs to.

    config: the drafter's configuration.   data: digest of the documents.   texts: settings of the written texts.
    start:  digest of the drafter that it began with; empty if it began by its recipe.
    """

    method: str
    config: dict[str, Any]
    verifier: Identity
    data: str
    texts: dict[str, Any]
    start: str = ""

    @classmethod
    def read(cls, run: Path) -> RunFacts | None:
        """Return the facts in a run folder, or None if it has none."""
        try:
            return from_plain(cls, json.loads((run / RUN).read_text(encoding="utf-8")), RUN)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, UsageError) as error:
            raise TrainingError(f"{run / RUN} is damaged ({error})", "give another --out") from None

    def write(self, run: Path) -> None:
        """Write the facts as a whole file or not at all."""
        unfinished = run / f"{RUN}.tmp"
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(run / RUN)

    def digest(self) -> str:
        """Names verifier and data in the run's checkpoints."""
        return hashlib.sha256(json.dumps([asdict(self.verifier), self.data]).encode()).hexdigest()

    def check_same(self, run: Path) -> None:
        """Raise TrainingError if the run folder has another verifier or texts of another recipe."""
        before = RunFacts.read(run)
        if before is None:
            raise TrainingError(f"{run} has no drafter's run to resume", "start without --resume")
        if before.verifier != self.verifier:
            raise TrainingError(
                f"the run in {run} has another verifier: expected {_short(before.verifier)}, found "
                f"{_short(self.verifier)}",
                "give the same --verifier as before",
            )
        if self.start and self.start != before.start:
            raise TrainingError(
                f"the run in {run} began with another drafter", "give the same --start as before, or none"
            )
        if before.data != self.data:
            raise TrainingError(
                f"the run in {run} was trained on other data", "give the same --data or --texts as before"
            )
        for name, value in self.texts.items():
            if before.texts.get(name) != value:
                raise TrainingError(
                    f"the run in {run} has another recipe: {name} was {before.texts.get(name)!r}, it is {value!r}",
                    "resume with the recipe that started it",
                )


def _short(identity: Identity) -> str:
    return f"weights {' '.join(d[:12] for d in identity.weights)} tokenizer {identity.tokenizer[:12]}"
