"""Small random models as GGUF files, in the form of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

Tensors = dict[str, np.ndarray]
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE, CONTEXT = 2, 4, 2, 16, 64, 96, 64
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}."
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
COMMON = dict(
    hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT, rope_theta=5000.0, bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip
RMS = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 5000.0, "rope.dimension_count": HEAD_DIM}
NORM = {"attention.layer_norm_epsilon": 1e-5}
GEMMA = {"attention.key_length": 256, "attention.value_length": 256, "rope.dimension_count": 256}
GEMMA_CONFIG = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=256, sliding_window=8, rms_norm_eps=1e-6)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, rms_norm_eps=1e-6)
MOE_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}


@dataclass(frozen=True)
class Architecture:
    """Names, the configuration that a file should give, and the file's keys in addition to `KEYS`.

    stored: changes a tensor of transformers to the file's form.   tokenizer: of a small model of the kind.
    """

    gguf: str
    model_type: str
    config: Mapping[str, Any]
    keys: Mapping[str, Any]
    stored: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values
    tokenizer: str = "gpt2"


def permuted(name: str, values: np.ndarray) -> np.ndarray:
    """Query and key rows in the order of rotary pairs in Llama files."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if not heads:
        return values
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def one_more(name: str, values: np.ndarray) -> np.ndarray:
    """Norms with the 1 that the model adds."""
    return values + 1 if name.endswith("norm.weight") else values


def transposed(name: str, values: np.ndarray) -> np.ndarray:
    """Matrices of `Conv1D` in the form of linear layers."""
    return values.T if values.ndim == 2 and ".h." in name else values


def flat_gate(name: str, values: np.ndarray) -> np.ndarray:
    """The shared expert's gate as a vector."""
    return values[0] if name.endswith("shared_expert_gate.weight") else values


ARCHITECTURES = {
    "llama": Architecture("llama", "llama", dict(rms_norm_eps=1e-6), RMS, permuted, "llama"),
    "qwen2": Architecture("qwen2", "qwen2", dict(rms_norm_eps=1e-6), {**RMS, "rope.dimension_count": HEAD_DIM}),
    "qwen3": Architecture(
        "qwen3", "qwen3", dict(rms_norm_eps=1e-6, head_dim=32),
        {**RMS, "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32},
    ),
    "qwen2moe": Architecture(
        "qwen2moe", "qwen2_moe", dict(MOE, shared_expert_intermediate_size=64),
        {**RMS, **MOE_KEYS, "expert_shared_feed_forward_length": 64}, flat_gate,
    ),
    "qwen3moe": Architecture(
        "qwen3moe", "qwen3_moe", dict(MOE, head_dim=32, norm_topk_prob=True),
        {**RMS, **MOE_KEYS, "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32},
    ),
    "gemma2": Architecture(
        "gemma2", "gemma2", dict(GEMMA_CONFIG, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
        {**RMS, **GEMMA, "attention.sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        one_more, "llama",
    ),
    "gemma3": Architecture(
        "gemma3", "gemma3_text", dict(GEMMA_CONFIG, num_hidden_layers=6),
        {**RMS, **GEMMA, "attention.sliding_window": 8}, one_more, "llama",
    ),
    "gpt2": Architecture("gpt2", "gpt2", {}, NORM, transposed),
    "phi3": Architecture(
        "phi3", "phi3", dict(sliding_window=16, rms_norm_eps=1e-6), {**RMS, "attention.sliding_window": 16},
        tokenizer="llama",
    ),
    "starcoder2": Architecture(
        "starcoder2", "starcoder2", dict(sliding_window=None, tie_word_embeddings=False),
        {**NORM, "rope.freq_base": 5000.0, "rope.dimension_count": HEAD_DIM},
    ),
    "stablelm": Architecture(
        "stablelm", "stablelm", dict(partial_rotary_factor=0.5, use_parallel_residual=False),
        {**NORM, "rope.freq_base": 5000.0, "rope.dimension_count": 8, "use_parallel_residual": False},
    ),
    "nemotron": Architecture(
        "nemotron", "nemotron", dict(partial_rotary_factor=0.5, head_dim=HEAD_DIM, rms_norm_eps=1e-5),
        {**NORM, "rope.freq_base": 5000.0, "rope.dimension_count": 8}, one_more,
    ),
}  # fmt: skip


@dataclass
class File:
    """The content of a GGUF file. Tests change it before it is written.

    types: of tensors by name, if not `default_type`; vectors are F32.   packed: bytes of tensors by name.
    """

    architecture: str
    keys: dict[str, Any]
    tensors: Tensors
    model: torch.nn.Module
    types: dict[str, str] = field(default_factory=dict)
    default_type: str = "F32"
    tokenizer: dict[str, Any] = field(default_factory=dict)
    packed: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write the file."""
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in {**{f"{self.architecture}.{k}": v for k, v in self.keys.items()}, **self.tokenizer}.items():
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        for name, values in self.tensors.items():
            kind = gguf.GGMLQuantizationType[self.types.get(name, self.default_type if values.ndim > 1 else "F32")]
            exact = np.ascontiguousarray(values, np.float32)
            data = self.packed[name] if name in self.packed else gguf.quants.quantize(exact, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


SCALES = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210), "Q4_1": slice(0, 4), "Q5_1": slice(0, 4)}
"""Bytes of a block that hold scales and minima in fp16; 0 to 2 for other types."""


def random_blocks(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes of a quantized type, [rows, bytes], with scales below two."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // numbers, size), np.uint8)
    blocks[..., SCALES.get(kind, slice(0, 2))][..., 1::2] &= 0xBF
    return blocks.reshape(shape[0], -1)


def random_file(name: str, default_type: str = "F32", **changes: Any) -> File:
    """A random model of the architecture and its file, not yet written."""
    known = ARCHITECTURES[name]
    tokenizer = byte_level_tokenizer() if known.tokenizer == "gpt2" else sentencepiece_tokenizer()
    values = {**COMMON, **known.config, "vocab_size": len(tokenizer["tokenizer.ggml.tokens"]), **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[known.model_type](**values)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    keys = {key: getattr(model.config, field) for key, field in KEYS.items() if hasattr(model.config, field)}
    if name == "gpt2":
        keys |= {"feed_forward_length": 4 * HIDDEN, "attention.head_count_kv": HEADS}
    return File(known.gguf, {**keys, **known.keys}, stored_tensors(model, known), model, {}, default_type, tokenizer)


def stored_tensors(model: Any, known: Architecture) -> Tensors:
    """The model's tensors by their GGUF names, in the converter's form."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == known.gguf)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        values = known.stored(name, tensor.numpy())
        if name.endswith("experts.gate_up_proj"):
            layer = re.findall(r"\d+", name)[0]
            gate, up = np.split(values, 2, axis=1)
            found |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            continue
        stem, _, suffix = name.rpartition(".") if name.endswith(("weight", "bias")) else (name, "", "weight")
        found[f"{names.get_name(stem)}.{suffix}"] = values
    return found


def by_transformers(path: Path) -> Any:
    """transformers' own model of the file. It requires accelerate, which reading a GGUF file does not use."""
    with mock.patch("transformers.modeling_utils.is_accelerate_available", return_value=True):
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def byte_level_tokenizer() -> dict[str, Any]:
    """Byte-level BPE with a few merges and an end of text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    specials = ["<unk>", "<s>", "<|endoftext|>", "<|im_end|>"]
    merges = ["t h", "th e", "Ġ the", "a n", "Ġ a", "Ġa n", "1 2"]
    tokens = [*specials, *bytes_to_unicode().values(), *("".join(merge.split()) for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(specials) + [1] * (len(tokens) - len(specials)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.chat_template": TEMPLATE,
    }


def sentencepiece_tokenizer() -> dict[str, Any]:
    """Sentencepiece with bytes, letters and a few words; merges follow from the scores."""
    specials = ["<unk>", "<s>", "</s>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["th", "the", "▁the", "an", "▁an", "▁a", "he", "▁t", "▁th"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,"]
    tokens = [*specials, *raw, *words, *letters]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }
