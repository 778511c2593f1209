"""The portable graphs lowered to ONNX Runtime's CPU kernels, so that a row's bits depend on its own sequence only.

order.py    rows in the order of their positions, which gives a tree a chain's numbers
batch.py    redraft::TreeAttention -> products and a softmax, any batch
single.py   redraft::TreeAttention -> com.microsoft.GroupQueryAttention, one sequence, rotation inside it
noise.py    redraft::AddNoise -> the hash in int32, skipped if no sequence of a call has noise
graphs.py   whole graphs: the attentions above, and fused Add with RMSNormalization
"""

from redraft.engines.lowering.graphs import lower_any, lower_batch, lower_chain, lower_single

__all__ = ["lower_any", "lower_batch", "lower_chain", "lower_single"]
