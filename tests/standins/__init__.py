"""Stand-ins of CUDA and TensorRT: one pair, which tests and `experiments.host_time` run on."""
