"""Tensors of a published draft checkpoint, from safetensors files or PyTorch's .bin files, read one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from redraft.errors import CheckpointError
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN
from redraft.export.checkpoint.safetensors import Checkpoint

EMBEDDING, HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
"""Names of tensors in all layouts."""
IN_LAYER = {
    "layer.q_proj.weight": "self_attn.q_proj.weight",
    "layer.k_proj.weight": "self_attn.k_proj.weight",
    "layer.v_proj.weight": "self_attn.v_proj.weight",
    "layer.o_proj.weight": "self_attn.o_proj.weight",
    "layer.mlp_norm.weight": "post_attention_layernorm.weight",
    "layer.gate_proj.weight": "mlp.gate_proj.weight",
    "layer.up_proj.weight": "mlp.up_proj.weight",
    "layer.down_proj.weight": "mlp.down_proj.weight",
}
BIASES = {f"layer.{one}_proj.bias": f"self_attn.{one}_proj.bias" for one in "qkv"}
"""Published names of biases, which EAGLE's drafters of Qwen2 have (`qkv_bias`)."""
TENSORS = {
    *(f"{layer}{name}" for layer in ("midlayer.", "layers.0.", "transformer.") for name in IN_LAYER.values()),
    *(f"layers.0.{name}" for name in BIASES.values()),
    *(f"{layer}{name}.weight" for layer in ("midlayer.", "layers.0.") for name in ("input_layernorm", "hidden_norm")),
    *("fc.weight", "fc.bias", "fusion_fc.weight", "fusion_fc.bias", "norm.weight", "input_norm.weight"),
    *(f"fc_norm.{i}.weight" for i in range(3)),
    *(EMBEDDING, HEAD, D2T, T2D),
}
"""Names of tensors in the layouts."""
_PREFIX = "model."
"""Some writers put it before the names of all tensors but the head's and the vocabulary's."""
_BUFFER = "rotary_emb.inv_freq"
"""Older checkpoints also store a buffer of this name, which the configuration determines."""
_PICKLES = "pytorch_model*.bin"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PublishedTensors:
    """The tensors of a folder. `open` reads no numbers.

    shapes: by name.   read: returns a tensor by its name.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]

    @classmethod
    def open(cls, path: Path) -> PublishedTensors:
        """Open *.safetensors, or pytorch_model*.bin if there are none. Raises CheckpointError naming a bad file."""
        pickles = sorted(path.glob(_PICKLES))
        if not pickles or any(path.glob("*.safetensors")):
            return _safetensors(path)
        tensors = {_plain(name): t for file in pickles for name, t in _unpickled(file).items() if _kept(name)}
        return cls(path, {name: tuple(t.shape) for name, t in tensors.items()}, tensors.__getitem__)

    def numbers(self, name: str) -> torch.Tensor:
        """Return a tensor of fp32, fp16 or bf16. Raises CheckpointError for another type, NaN and infinity."""
        tensor = self.read(name)
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.path}: {name} is stored as {_type(tensor)}, expected float32, float16 or bfloat16",
                "give the checkpoint that is not quantized",
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{self.path}: {name} has a number that is not finite", DOWNLOAD_AGAIN)
        return tensor

    def integers(self, name: str) -> torch.Tensor:
        """Return a tensor of integers, or of True and False, as int64. Raises CheckpointError for another type."""
        tensor = self.read(name)
        if tensor.is_floating_point() or tensor.is_complex():
            raise CheckpointError(f"{self.path}: {name} is stored as {_type(tensor)}, expected integers")
        return tensor.long()


def _safetensors(path: Path) -> PublishedTensors:
    checkpoint = Checkpoint.open(path)
    stored = {_plain(name): entry for name, entry in checkpoint.tensors.items() if _kept(name)}

    def read(name: str) -> torch.Tensor:
        with safe_open(str(path / stored[name].file), "pt") as file:
            tensor: torch.Tensor = file.get_tensor(stored[name].name)
        return tensor

    return PublishedTensors(path, {name: entry.shape for name, entry in stored.items()}, read)


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a .bin file, mapped from the disk. The file cannot run code."""
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # noqa: BLE001 (torch raises errors of many types for a damaged file)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{file} cannot be read as tensors by name ({reason})", DOWNLOAD_AGAIN) from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise CheckpointError(f"{file} does not hold tensors by name", "give a file of the weights alone")
    return found


def _kept(name: str) -> bool:
    return not name.endswith(_BUFFER)


def _plain(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
