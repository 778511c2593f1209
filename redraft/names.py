"""The only home of the names of graphs, tensors and files, of element types, and of a few sizes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "fp8"]
"""fp32, fp16, bf16: one type for weights, KV and features. int8, int4, fp8: quantized weights only, and
`BuildConfig.compute_dtype` for everything else.
"""
Dtype = Literal["int64", "int32", "bool", "int8", "uint8", "float32", "float16", "bfloat16"]
ELEMENTS: dict[Precision, Dtype] = {
    "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "float32", "int4": "float32", "fp8": "float16",
}  # fmt: skip
"""Element type of features, unquantized weights and, by default, KV buffers. Logits are float32 always."""

Dim = int | str
"""A fixed size, or the name of a symbol that the caller chooses per call."""

VERIFIER = "verifier"
"""The verifier's graph, any batch, standard operators only. GPU engines are built from it."""
VERIFIER_BATCH = "verifier.batch"
"""The same graph lowered to ONNX Runtime's CPU kernels, any batch (absent in halves)."""
VERIFIER_SINGLE = "verifier.single"
"""The same, to the bit, for chains of one sequence (absent if the kernel does not fit the model)."""
VERIFIER_FAST = "verifier.fast"
"""As `VERIFIER_SINGLE`, but a single row may differ from several in its last bits, and is faster for it."""
VERIFIER_OPERATORS = "verifier.operators"
"""The same for redraft's own attention on CPUs, any batch: one graph, exact and fast (absent in halves)."""

DRAFT, STEER, RESAMPLE, COPY_SLOT = "draft", "steer", "resample", "copy_slot"
"""Roles of a drafter's graphs: draft a fresh tree, compute its steering before, resample the last draft's unused steps,
copy state between slots."""
SINGLE = ".single"
"""Suffix of a role whose graph is lowered for one sequence, like `VERIFIER_SINGLE`."""
OPERATORS = ".operators"
"""Suffix of a role whose graph is for redraft's operators, any batch, like `VERIFIER_OPERATORS`."""
BATCH = ".batch"
"""Suffix of a role whose graph is the portable one with the CPU's form of `ADD_NOISE`, for any batch."""

STEP_PREPARE_TREE = "step.prepare_tree"
"""Makes the verifier's inputs from a tree's tokens and parents, on the device."""
STEP_ACCEPT = "step.accept"
"""Finds the nodes of a tree that the verifier's logits accept, on the device."""
STEP_ACCEPT_SAMPLED = "step.accept_sampled"
"""The same for tokens that are sampled with a temperature and the noise of a seed."""
STEP_COMPACT_KV = "step.compact_kv"
"""Makes rows of the accepted path contiguous in all KV buffers, by standard operators."""
STEP_GATHER_FEATURES = "step.gather_features"
"""Appends feature rows of the accepted path to a drafter's pending rows."""
STEP_STORE_TREES = "step.store_trees"
"""Puts trees that a drafter made for some slots of a batch among the trees to verify next."""
STEP_COPY_SLOT = f"step.{COPY_SLOT}"
"""Copies one sequence's KV rows to another slot."""

TOKEN_IDS = "token_ids"
POSITIONS = "positions"
TREE_MASK = "tree_mask"
CACHE_LEN = "cache_len"
KV_LEN = "kv_len"
OUTPUT_ROWS = "output_rows"
PACKED_ROWS = "packed_rows"
LOGITS = "logits"

FEATURE_ROWS = "features"
TOKENS = "tokens"
NUM_PENDING = "num_pending"
CHAIN_LOGITS = "chain_logits"
FIRST_STEP = "first_step"
DRAFT_LOGIT_SCALE = "draft_logit_scale"
NOISE_SCALE = "noise_scale"
NOISE_KEYS = "noise_keys"
TEMPERATURE = "temperature"
DRAWN = "drawn"
"""1 for sequences whose candidates are drawn from the drafter's distribution, otherwise 0."""
DRAFT_VOCABULARY = "draft_vocabulary"
"""Token of each column of a drafter's logits (EAGLE-3's d2t)."""
TREE_TOKENS = "tree.tokens"
TREE_PARENTS = "tree.parents"
TREE_LOG_PROBS = "tree.log_probs"
TREE_COUNT = "tree.count"
CANDIDATES, CANDIDATE_LOG_PROBS = "candidates", "candidate_log_probs"
STEERING, STEERING_LAST = "steering", "steering.last"
DRAFTED = "drafted"
STORED_TOKENS = "stored.tokens"
STORED_PARENTS = "stored.parents"
HOST_TOKENS = "host.tokens"
HOST_PARENTS = "host.parents"
ON_DEVICE = "on_device"
PARENTS = "parents"
NODES = "nodes"
PATH = "path"
ACCEPT_OUTPUT = "accept_output"
PENDING_FEATURES = "pending_features"
PENDING_OFFSET = "pending_offset"
SOURCE_SLOT = "source_slot"
TARGET_SLOT = "target_slot"
TOKEN_INFO = "token_info."
"""Prefix of the names of tensors that hold token information."""

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATES_FOLDER = "additional_chat_templates"
DEFAULT_CHAT_TEMPLATE = "default"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_CONFIG_FILE = "generation_config.json"
"""Files of a checkpoint and of a bundle alike."""
DO_SAMPLE = "do_sample"
SAMPLING_DEFAULTS = (DO_SAMPLE, "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Values of a checkpoint's generation_config.json that a bundle keeps."""

TREE_ATTENTION_DOMAIN = "redraft"
TREE_ATTENTION = "TreeAttention"
TREE_ATTENTION_INPUTS = 9
"""Inputs of every TreeAttention node; sinks are an optional one more."""
CPU_TREE_ATTENTION = "CpuTreeAttention"
"""The operator's form for redraft's operators on CPUs, with a rotation and packed rows."""
LARGEST_HALF = 65504.0
"""Keys and values in fp16 are at most this: an infinity in a row would reach sums that give the row no share."""
SILU_GATE = "SiluGate"
"""silu(g) * u of the halves g and u of each row, for redraft's operators on CPUs."""
SUMMED_PRODUCT = "SummedProduct"
"""A MatMulNBits that appends the sums of blocks to its input itself, for redraft's operators on CPUs."""
ADD_NOISE, TOKEN_HASHES, QUADRATIC = "AddNoise", "TokenHashes", "Quadratic"
"""Another operator of that domain, and the functions in its body: the hash, which the CPU has in another form, and a
part of it."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph. `in_place_of` names the input whose buffer an output must share."""

    name: str
    dtype: Dtype
    shape: tuple[Dim, ...]
    in_place_of: str | None = None


PRODUCTS = ("MatMulNBits", SUMMED_PRODUCT)
"""Products of weights in blocks, with K, N, bits and block_size."""
CODES, SCALES, ZEROS = ".codes", ".scales", ".zeros"
"""Suffixes of the names of a MatMulNBits's tensors, after the parameter's name."""
ROWS, SMOOTHING = ".rows", ".smoothing"
"""Suffixes of codes that are looked up by row, and of the numbers that multiply a product's inputs."""
QUANTIZATION_BLOCK = 32
"""Inputs of an output that share a scale and a zero point in a MatMulNBits."""


@dataclass(frozen=True)
class WeightRef:
    """Place of an initializer's bytes: `length` bytes at `offset` of `file`, a path relative to the graph's folder."""

    initializer: str
    file: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]


def single(graph: str) -> str:
    """Name of the same graph, lowered for one sequence."""
    return f"{graph}{SINGLE}"


def batch(graph: str) -> str:
    """Name of the same graph with the CPU's form of the noise, for any batch."""
    return f"{graph}{BATCH}"


def operators(graph: str) -> str:
    """Name of the same graph for redraft's operators, for any batch."""
    return f"{graph}{OPERATORS}"


def key_cache(layer: int) -> str:
    """Name of the key buffer of `layer`, shape [B, H_kv, C, D]."""
    return f"kv.{layer}.key"


def value_cache(layer: int) -> str:
    """Name of the value buffer of `layer`, shape [B, H_kv, C, D]."""
    return f"kv.{layer}.value"


def is_cache(name: str) -> bool:
    """Return True for the name of a KV buffer."""
    return name.startswith("kv.")


def drafter_graph(drafter: str, role: str) -> str:
    """Return the name of a drafter's graph in a bundle."""
    return f"{drafter}.{role}"


def present(cache: str) -> str:
    """Name of the graph output that updates the KV buffer `cache` in place."""
    return f"{cache}.present"


def link(cache: str, number: int) -> str:
    """Name of the KV buffer `cache` between two nodes of an engine that write rows of it, one after the other."""
    return f"{cache}.link.{number}"


def linked(name: str) -> str:
    """The buffer that `link` gave this name; empty for any other name."""
    cache, _, number = name.rpartition(".link.")
    return cache if number.isdecimal() else ""


LAST_HIDDEN_STATE = "last"
"""The hidden state after the final norm."""


def hidden_states(hidden_state: str) -> str:
    """Name of the feature output of `hidden_state`, shape [B, T, n]: LAST_HIDDEN_STATE, or `3` after layer 3."""
    return f"hidden_states.{hidden_state}"


def of_state(name: str, place: int) -> str:
    """Name of FEATURE_ROWS or PENDING_FEATURES for the hidden state at this place of a drafter's."""
    return f"{name}.{place}" if place else name


CATCH_UP_ROWS = 64
"""Largest number of rows to catch up on in one draft call. Buffers and tables have as many beyond the context."""
DRAFT_WIDTHS = (16, CATCH_UP_ROWS)
"""Widths of a device's draft calls, in rows: few in a step, many after a prompt."""
TREE_WIDTHS = (1, 2, 4, 8, 13, 16, 32, 64)
"""Nodes, root included, that a device verifies at once. Other trees are padded to the next width."""
_WIDE_STEP = 32
MOST_DEPTH = 64
"""Depth of the deepest node that `STEP_PREPARE_TREE` can place."""
MAX_PENDING_FEATURES = 512
"""Feature rows of a sequence in a device's buffer: the rows to catch up on, and the rows of one call."""


_KV_ROW_STEP = 16


def kv_rows(tokens: int) -> int:
    """Rows of a KV buffer's slot that hold `tokens` tokens: the next multiple of 16.

    Every slot then begins at an address that TensorRT takes, if a row has at least 16 bytes.
    """
    return -(-tokens // _KV_ROW_STEP) * _KV_ROW_STEP


@lru_cache
def padded_width(nodes: int) -> int:
    """Nodes that a tree is padded to: the next of TREE_WIDTHS, or the next multiple of 32 if it is larger."""
    place = bisect_left(TREE_WIDTHS, nodes)
    return TREE_WIDTHS[place] if place < len(TREE_WIDTHS) else -(-nodes // _WIDE_STEP) * _WIDE_STEP
