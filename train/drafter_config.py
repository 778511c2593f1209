"""The recipe of a drafter: its texts, the steps between measurements, and its method's table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from redraft.errors import UsageError
from redraft.records import PositiveInt
from redraft.train.config import Recipe

if TYPE_CHECKING:
    from redraft.train.verifier_model import VerifierModel

Init = Literal["random", "layer", "layers", "mtp", "features"]
"""The initial weights of a new drafter."""
Answers = Literal["all", "greedy", "sampled"]
MIXTURE = ("text", "greedy", "sampled")


@dataclass(frozen=True)
class SelfText:
    """Text that the verifier writes before training, from prompts cut from the training documents.

    rows:              of each kind and temperature, with `prompt_tokens` of a document and `new_tokens` of the
    verifier.
    temperatures:      0 is greedy decoding.
    text, greedy, sampled: shares of the documents themselves, of greedy and of sampled text in a kind's batches.
    held_out_rows:     greedy rows of a kind, from held-out documents, to measure acceptance on.
    """

    rows: PositiveInt = 384
    prompt_tokens: PositiveInt = 64
    new_tokens: PositiveInt = 160
    temperatures: tuple[float, ...] = (0.0, 1.0)
    text: float = 0.34
    greedy: float = 0.33
    sampled: float = 0.33
    held_out_rows: PositiveInt = 16

    def __post_init__(self) -> None:
        if any(t < 0 for t in self.temperatures):
            raise UsageError(f"self_text.temperatures must not be negative, they are {list(self.temperatures)}")
        if min(self.text, self.greedy, self.sampled) < 0 or self.text + self.greedy + self.sampled <= 0:
            raise UsageError("self_text.text, greedy and sampled must be shares, not negative and not all zero")
        for share, found in (("greedy", 0.0 in self.temperatures), ("sampled", any(self.temperatures))):
            if getattr(self, share) and not found:
                raise UsageError(
                    f"self_text.{share} is {getattr(self, share)}, but temperatures are {list(self.temperatures)}",
                    f"add a {share} temperature, or set {share} = 0",
                )

    def temperatures_of(self, source: str) -> tuple[float, ...]:
        """Return the temperatures whose rows are in the `greedy` or the `sampled` stream."""
        return tuple(t for t in self.temperatures if (t == 0) == (source == "greedy"))

    def shares(self) -> dict[str, float]:
        """The sources that batches are drawn from: `text`, `greedy`, `sampled`."""
        return {source: getattr(self, source) for source in MIXTURE if getattr(self, source)}


@dataclass(frozen=True)
class DrafterTable:
    """The fields that every method's `[drafter]` table has.

    draft_vocabulary: tokens that the drafter can draft, the most frequent ones of its texts; 0 means all.
    init: `random`; `layer` begins with the verifier's last layer and projections fitted to its inputs, `layers` with
    several of its layers, `mtp` with its multi-token-prediction module, `features` with a projection fitted to the next
    feature. A method has some of them. Of a layer, a smaller `intermediate_size` keeps the neurons that add most.
    """

    draft_vocabulary: Annotated[int, 0, "a number of tokens"] = 0
    init: Init = "random"


@dataclass(frozen=True)
class LayerTable(DrafterTable):
    """The table of a drafter with a layer of its own. A size of 0 is the verifier's."""

    intermediate_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    def sizes(self, verifier: VerifierModel) -> dict[str, int]:
        """Return fields of a `LayerConfig`: the table's, the draft vocabulary, and biases as the verifier's."""
        names = ("intermediate_size", "heads", "kv_heads", "head_dim")
        own = {name: getattr(self, name) for name in names}
        return {**own, "draft_vocab_size": self.draft_vocabulary, "qkv_bias": verifier.qkv_bias}


@dataclass(frozen=True)
class DrafterRecipe(Recipe):
    """A drafter's run. Without `weights`, every kind of the data has equal weight.

    method:          the drafting method, which defines the `drafter` table.
    evaluate_every:  steps between measurements of acceptance.
    texts:           texts of a batch, if they are whole texts of `redraft train text`; batch_tokens and seq_len are for
                     documents.
    answers:         which of these texts to learn from: all, or those that were written greedily, or by sampling.
    """

    method: str = ""
    drafter: DrafterTable = field(default_factory=DrafterTable)
    self_text: SelfText = field(default_factory=SelfText)
    evaluate_every: PositiveInt = 50
    texts: PositiveInt = 16
    answers: Answers = "all"

    def course(self, step: int) -> tuple[float, ...]:
        """Return the values that `step` takes from the adjustable fields."""
        passes = getattr(self.drafter, "passes_at", None)
        return super().course(step) if passes is None else (*super().course(step), passes(step, self.steps))

    def stream_weights(self) -> dict[str, float]:
        """Return weights of the streams that batches are drawn from: `kind`, `kind.greedy` and `kind.sampled`."""
        return {
            stream_name(kind, source): weight * share
            for kind, weight in self.weights.items()
            for source, share in self.self_text.shares().items()
        }


def stream_name(kind: str, source: str) -> str:
    """Return the name of the stream of a kind's documents (`text`), or of the verifier's texts."""
    return kind if source == "text" else f"{kind}.{source}"
