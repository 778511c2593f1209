"""Tree attention and KV compaction on the GPU: CUDA kernels, a TensorRT plugin, and the kernels built for a CPU."""
