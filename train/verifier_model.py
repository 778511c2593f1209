"""A verifier for training drafters: any causal language model of transformers, frozen, with its tokenizer."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.drafters.checkpoint import Identity
from redraft.export.gguf.checkpoint import GgufCheckpoint, open_checkpoint
from redraft.export.reference import read_model
from redraft.names import LAST_HIDDEN_STATE, TOKENIZER_FILE
from redraft.train.states import run_verifier

# torch's RMSNorm has no fused form for bf16 rows with fp32 gains, which a drafter has under autocast, and says so.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
_HEAD_TOLERANCE = 0.02  # relative to the largest logit; weights may be bf16


@dataclass(frozen=True)
class VerifierModel:
    """A loaded verifier. `tokenizer` is its tokenizer.json, whose tokens all have embeddings.

    texts: a folder with tokenizer and chat template; a GGUF file's is temporary.
    """

    checkpoint: AnyCheckpoint
    model: Any
    tokenizer: Tokenizer
    texts: Path

    @property
    def config(self) -> Any:
        """The language model's configuration."""
        return self.model.config.get_text_config()

    @cached_property
    def identity(self) -> Identity:
        """Digests of weights and tokenizer. Reads the whole checkpoint once."""
        return Identity.of(self.checkpoint)

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Width of the features."""
        return int(self.config.hidden_size)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def qkv_bias(self) -> bool:
        """True if layers add biases to queries, keys and values, as Qwen2's do."""
        return any(name.endswith("self_attn.q_proj.bias") for name, _ in self.model.named_parameters())

    @property
    def max_positions(self) -> int | None:
        """The longest text, if the configuration has a limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def bos(self) -> int | None:
        """The token that begins a text, or None."""
        return _first(self.config.bos_token_id)

    @property
    def eos(self) -> int | None:
        """The token that ends a text, or None."""
        return _first(self.config.eos_token_id)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text, by the configuration and the generation configuration."""
        named = [self.config.eos_token_id, getattr(self.model.generation_config, "eos_token_id", None)]
        tokens = [token for some in named for token in (some if isinstance(some, (list, tuple)) else [some])]
        return frozenset(token for token in tokens if isinstance(token, int))

    @property
    def logit_scale(self) -> float:
        """Factor on the head's product."""
        return model_config.logit_scale(self.config)


def open_verifier(path: Path, device: str, dtype: torch.dtype | None = None) -> VerifierModel:
    """Load a checkpoint folder or a GGUF file, in evaluation mode, its parameters frozen.

    dtype: of its weights and of products in training; None takes fp32 on the CPU and bf16 on CUDA.

    Raises CheckpointError if the folder is missing or damaged or has no tokenizer that fits, and UnsupportedModelError
    if logits are not its LM head's product with its features times a constant.
    """
    checkpoint = open_checkpoint(path)
    configuration = model_config.load_config(checkpoint)  # refuses models that redraft cannot export
    texts = _text_files(checkpoint)
    tokenizer = _tokenizer(texts)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    model: Any
    if not isinstance(checkpoint, GgufCheckpoint) and checkpoint.config.get("model_type") not in model_config.SAME_AS:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
    else:
        model = read_model(checkpoint, Architecture.of(configuration), "sdpa", dtype)
    found = VerifierModel(checkpoint, model.to(device).requires_grad_(False).eval(), tokenizer, texts)
    tokens = tokenizer.get_vocab_size()
    if tokens > found.vocab_size:
        raise CheckpointError(
            f"{path / TOKENIZER_FILE} has {tokens} tokens, more than the {found.vocab_size} of the model",
            "give the tokenizer that the model was trained with",
        )
    _check_head(found)
    return found


def fast_dtype(device: str) -> torch.dtype:
    """Return bf16 if the device multiplies it faster than fp32, else fp32."""
    fast = device == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def check_device(device: str) -> None:
    """Raise UsageError if the device is not usable on this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is usable here", "use --device cpu")


def _text_files(checkpoint: AnyCheckpoint) -> Path:
    """Return a folder with tokenizer and chat template."""
    if not isinstance(checkpoint, GgufCheckpoint):
        return checkpoint.path
    folder = Path(tempfile.mkdtemp(prefix="redraft-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    checkpoint.write_text_files(folder)
    return folder


def _tokenizer(path: Path) -> Tokenizer:
    """Return the verifier's tokenizer, without truncation and padding that its file may hold."""
    try:
        tokenizer = Tokenizer.from_file(str(path / TOKENIZER_FILE))
    except Exception as error:  # tokenizers raises plain exceptions  # noqa: BLE001
        raise CheckpointError(
            f"{path / TOKENIZER_FILE} cannot be read ({error})", "save the model's fast tokenizer there"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def drafter_embedding(verifier: Any) -> nn.Embedding:
    """Return the verifier's embedding as drafters read it: its rows as they are. Gemma's own module scales them."""
    found: nn.Embedding = nn.Embedding.from_pretrained(verifier.get_input_embeddings().weight)
    return found


def autocast_of(verifier: Any) -> torch.autocast:
    """Compute products in bf16 if the verifier is in bf16. A drafter's parameters are in fp32."""
    return torch.autocast(verifier.device.type, dtype=torch.bfloat16, enabled=verifier.dtype == torch.bfloat16)


def _check_head(verifier: VerifierModel) -> None:
    """Check that logits are the head's product times a constant: drafters apply the verifier's head to their states."""
    kind, head = verifier.config.model_type, verifier.model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UnsupportedModelError(
            f"the LM head of {kind} has a bias, which drafters do not add", "choose a verifier without one"
        )
    tokens = torch.arange(8, device=verifier.model.device)[None] % verifier.vocab_size
    with torch.inference_mode():
        hidden, logits = run_verifier(verifier.model, tokens)
        expected = F.linear(hidden[LAST_HIDDEN_STATE], head.weight).float() * verifier.logit_scale
    if (logits - expected).abs().max() > _HEAD_TOLERANCE * logits.abs().max():
        raise UnsupportedModelError(
            f"the logits of {kind} are not its LM head's product with its features times a constant",
            "choose a verifier without a softcap on its logits",
        )


def _first(token: Any) -> int | None:
    token = token[0] if isinstance(token, (list, tuple)) and token else token
    return token if isinstance(token, int) else None
