"""Which rows a projection is fitted to. The fit itself is held by `test_the_start_is_a_linear_prediction`."""

from __future__ import annotations

import torch
from torch import nn

from redraft.train import fitted_projections
from redraft.train.batches import Batch
from redraft.train.fitted_projections import fit_projections
from redraft.train.states import run_verifier, states_of

LENGTH = 20


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield Batch.whole(torch.randint(0, 400, (8, LENGTH), generator=generator), ("a",) * 8, 2)


def layer_input(verifier):
    """The hidden state that the last layer reads."""
    return str(verifier.layers - 2)


def fitted(verifier, batches):
    """Return the weight of a projection of the last hidden state."""
    projection = nn.Linear(32, 32, bias=False)
    fit_projections([(projection, lambda hidden, _: hidden["last"])], verifier.model, batches, layer_input(verifier))
    return projection.weight.detach()


def test_only_as_many_texts_are_computed_as_the_fit_needs(verifier, monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return run_verifier(*args, **options)

    monkeypatch.setattr(fitted_projections, "run_verifier", counted)
    fitted(verifier, texts(40, 0))
    assert len(calls) == 11  # of 8 * 19 rows, for 50 * 32
    monkeypatch.setattr(fitted_projections, "_MOST_ROWS", 700)
    fitted(verifier, texts(40, 0))
    assert len(calls) == 11 + 5
    monkeypatch.setattr(fitted_projections, "_MOST_ROWS", 100)
    fitted(verifier, texts(40, 0))
    assert len(calls) == 11 + 5 + 4  # 19 * 32


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
