"""Stand-ins of CUDA and TensorRT: one pair."""
