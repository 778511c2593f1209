"""Stand-ins of CUDA and TensorRT: one pair, for tests and for `experiments.host_time`."""
