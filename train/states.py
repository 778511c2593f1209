"""The verifier's computation of a batch of texts: hidden states, and the likeliest tokens after every position.

Drafters learn from the 64 likeliest logits instead of all: they hold nearly all probability, and a text's states can be
kept on disk, so that the verifier runs once for any number of epochs and methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from redraft.export.checkpoint import model_config
from redraft.export.drafters.block_storage import coded, decoded
from redraft.export.quantization.rounding import BLOCK, blocks_of
from redraft.names import LAST_HIDDEN_STATE
from redraft.train.text_shards import HIDDEN

TOP_LOGITS = 64
_HEAD_ROWS = 128
"""Positions whose logits are computed at once."""
_ROWS = 32
"""Rows of logits that are read at once. In fp32 they fit the processor's caches, which all rows of a batch do not."""


@dataclass(frozen=True)
class States:
    """The verifier's computation of tokens [B, L].

    hidden:     [B, L, n] by hidden state.
    top_ids, top_logits: int and float [B, L, K], the likeliest next tokens, likeliest first; K is 64, or V if smaller.
    log_sum:    float [B, L], the logarithm of the sum of exp(logit) over the whole vocabulary.
    """

    hidden: Mapping[str, torch.Tensor]
    top_ids: torch.Tensor
    top_logits: torch.Tensor
    log_sum: torch.Tensor

    @property
    def last(self) -> torch.Tensor:
        """Features after the final norm, [B, L, n]."""
        return self.hidden[LAST_HIDDEN_STATE]

    @property
    def greedy(self) -> torch.Tensor:
        """The likeliest next token, [B, L]."""
        return self.top_ids[..., 0]

    def to(self, device: torch.device) -> States:
        """Return the states on a device."""
        hidden = {name: tensor.to(device) for name, tensor in self.hidden.items()}
        return States(hidden, self.top_ids.to(device), self.top_logits.to(device), self.log_sum.to(device))

    def to_numpy(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of `redraft.train.text_shards`: hidden states in 8 bits, logits in half precision."""
        tensors = {HIDDEN + name: _stored(tensor) for name, tensor in self.hidden.items()}
        tensors |= {"top_ids": self.top_ids.int(), "top_logits": self.top_logits.half(), "log_sum": self.log_sum}
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> States:
        """Return the states that were kept: the arrays of `to_numpy`, as tensors."""
        stored = {name: tensor for name, tensor in tensors.items() if name.startswith(HIDDEN)}
        hidden = {name.removeprefix(HIDDEN): _rows(tensor) for name, tensor in stored.items()}
        return cls(hidden, tensors["top_ids"].long(), tensors["top_logits"].float(), tensors["log_sum"])


def stored_size(width: int) -> int:
    """Return the bytes that keep a row of `width` numbers."""
    return width + 2 * blocks_of(width)


def _stored(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [..., n] as int8 [..., stored_size(n)]: their codes, then the bytes of their scales."""
    codes, scales = coded(rows.float())
    return torch.cat([codes, scales.view(torch.int8)], -1)


def _rows(stored: torch.Tensor) -> torch.Tensor:
    """Return the rows that `_stored` made, in half precision."""
    blocks = -(-stored.shape[-1] // stored_size(BLOCK))
    codes, scales = stored[..., : -2 * blocks], stored[..., -2 * blocks :].contiguous()
    return decoded(codes, scales.view(torch.half)).half()


def states_of(hidden: Mapping[str, torch.Tensor], logits: torch.Tensor) -> States:
    """Return the states of hidden states and logits [B, L, V] of any float type."""
    pieces = [_likeliest(piece.float()) for piece in logits.flatten(0, 1).split(_ROWS)]
    ids, values, log_sum = (torch.cat(parts).unflatten(0, logits.shape[:2]) for parts in zip(*pieces, strict=True))
    return States(hidden, ids, values, log_sum)


def states_of_tokens(verifier: Any, tokens: torch.Tensor, hidden_states: Sequence[str]) -> States:
    """Return the states of tokens [B, L].

    The head's product is taken for a few positions at a time, since all logits of a call may be gigabytes. The head
    must be as `verifier_model.open_verifier` checks it.
    """
    names = dict.fromkeys((LAST_HIDDEN_STATE, *hidden_states))
    hidden, _ = run_verifier(verifier, tokens, tuple(names), every_logit=False)
    head, scale = verifier.get_output_embeddings(), model_config.logit_scale(verifier.config.get_text_config())
    parts = hidden[LAST_HIDDEN_STATE].flatten(0, 1).split(_HEAD_ROWS)
    pieces = [_likeliest(logits.float() * scale) for part in parts for logits in head(part).split(_ROWS)]
    ids, values, log_sum = (torch.cat(parts).unflatten(0, tokens.shape) for parts in zip(*pieces, strict=True))
    return States({name: hidden[name] for name in hidden_states}, ids, values, log_sum)


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, logits and `States.log_sum` of rows of logits [R, V]."""
    values, ids = logits.topk(min(TOP_LOGITS, logits.shape[-1]))
    largest = values[:, :1]
    return ids, values, (logits - largest).exp_().sum(-1).log_() + largest[:, 0]


def run_verifier(
    verifier: Any, tokens: torch.Tensor, hidden_states: Sequence[str] = (LAST_HIDDEN_STATE,), every_logit: bool = True,
    **arguments: Any,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # fmt: skip
    """Return hidden states [B, L, n] by name, and logits [B, L, V] of the verifier's type, of tokens [B, L].

    Names are those of engines: `last` is after the final norm, `3` is the output of the layer with index 3, from 0.
    every_logit: False to compute logits of the last position alone.   arguments: for the model's forward.
    """
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, args, *output: kept.update({name: _tensor(output[0]) if output else args[0]})

    layers = verifier.get_decoder().layers if set(hidden_states) - {LAST_HIDDEN_STATE} else ()
    head = verifier.get_output_embeddings()
    hooks = [head.register_forward_pre_hook(keep(LAST_HIDDEN_STATE))]
    if not every_logit:
        # Contiguous: torch copies the head's matrix for every text otherwise.
        hooks.append(head.register_forward_pre_hook(lambda module, args: (args[0][:, -1:].contiguous(),)))
    hooks += [layers[int(n)].register_forward_hook(keep(n)) for n in hidden_states if n != LAST_HIDDEN_STATE]
    try:
        out = verifier(tokens, **{"use_cache": False, **arguments})
    finally:
        for hook in hooks:
            hook.remove()
    return {name: kept[name] for name in hidden_states}, out.logits


def _tensor(output: Any) -> torch.Tensor:
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found
