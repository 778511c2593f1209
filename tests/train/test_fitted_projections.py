"""A fitted projection gives the least-squares prediction of the last layer's inputs, from as much text as it needs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from redraft.train import fitted_projections
from redraft.train.batches import Batch
from redraft.train.fitted_projections import fit_projections
from redraft.train.states import run_verifier, states_of
from redraft.train.verifier_model import open_verifier

LENGTH = 20


@pytest.fixture(scope="module")
def verifier(verifier_folder):
    return open_verifier(verifier_folder, "cpu")


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield Batch.whole(torch.randint(0, 400, (8, LENGTH), generator=generator), ("a",) * 8, 2)


def layer_input(verifier):
    """The hidden state that the last layer reads."""
    return str(verifier.layers - 2)


def known_and_wanted(verifier, batch):
    """Rows of all texts: hidden states, the tokens after them, and the last layer's inputs at the next position."""
    hidden, _ = run_verifier(verifier.model, batch.tokens, ("last", layer_input(verifier)))
    return (
        hidden["last"][:, :-1].flatten(0, 1),
        batch.tokens[:, 1:].flatten(),
        hidden[layer_input(verifier)][:, 1:].flatten(0, 1),
    )


def normalized(embed):
    """Embeddings of the size of hidden states."""
    return lambda tokens: F.rms_norm(embed(tokens), (32,))


def test_the_fit_is_that_of_least_squares(verifier):
    """Both projections of one call, against torch's solver over the same rows."""
    embed = normalized(verifier.model.get_input_embeddings())
    both, alone = nn.Linear(64, 32, bias=False), nn.Linear(32, 32, bias=False)
    fit_projections(
        [
            (both, lambda hidden, tokens: torch.cat([hidden["last"], embed(tokens)], -1)),
            (alone, lambda hidden, _: hidden["last"]),
        ],
        verifier.model, texts(40, 0), layer_input(verifier),
    )  # fmt: skip
    parts = [known_and_wanted(verifier, batch) for batch in texts(22, 0)]  # 22 * 8 * 19 rows are the first over 50 * 64
    hidden, tokens, wanted = (torch.cat(part) for part in zip(*parts, strict=True))
    for projection, inputs in ((both, torch.cat([hidden, embed(tokens)], -1)), (alone, hidden)):
        expected = torch.linalg.lstsq(inputs, wanted).solution.mT
        error = (inputs @ projection.weight.mT - wanted).square().mean()
        least = (inputs @ expected.mT - wanted).square().mean()
        assert least <= error < 1.02 * least
        assert error < 0.9 * wanted.var(0).mean()


def fitted(verifier, batches):
    """Return the weight of a projection of the last hidden state."""
    projection = nn.Linear(32, 32, bias=False)
    fit_projections([(projection, lambda hidden, _: hidden["last"])], verifier.model, batches, layer_input(verifier))
    return projection.weight.detach()


def test_only_as_many_texts_are_computed_as_the_fit_needs(verifier, monkeypatch):
    calls = []
    monkeypatch.setattr(fitted_projections, "run_verifier", lambda *args: calls.append(args) or run_verifier(*args))
    fitted(verifier, texts(40, 0))
    assert len(calls) == 11  # of 8 * 19 rows, for 50 * 32


def test_kept_hidden_states_are_read_and_not_computed_again(verifier, monkeypatch):
    """The fit is that of the kept numbers, here twice the verifier's. A batch without the wanted one is computed."""
    names = ("last", layer_input(verifier))

    def kept(batch, factor, names):
        hidden, logits = run_verifier(verifier.model, batch.tokens, names)
        found = states_of({name: factor * tensor for name, tensor in hidden.items()}, logits)
        return Batch(batch.tokens, batch.kinds, batch.starts, batch.ends, found)

    plain = fitted(verifier, texts(11, 0))
    assert torch.allclose(fitted(verifier, [kept(batch, 1, ("last",)) for batch in texts(11, 0)]), plain, atol=1e-6)
    twice = [kept(batch, torch.tensor(2.0), names) for batch in texts(11, 0)]
    for batch in twice:
        batch.states.hidden[names[1]].mul_(2)  # the target alone is four times as large
    monkeypatch.setattr(fitted_projections, "run_verifier", None)
    assert torch.allclose(fitted(verifier, twice), 2 * plain, atol=1e-5)


def test_padding_is_not_fitted(verifier):
    """Positions after a text's end change nothing."""
    tokens = torch.randint(0, 400, (8, LENGTH), generator=torch.Generator().manual_seed(3))
    padded = torch.cat([tokens, torch.zeros(8, 7, dtype=torch.long)], 1)
    batches = [Batch(rows, ("a",) * 8, torch.zeros(8, 1).long(), torch.full((8,), LENGTH)) for rows in (tokens, padded)]
    assert torch.allclose(*(fitted(verifier, [batch]) for batch in batches), atol=1e-5)
