"""Tree attention and KV compaction on the GPU: CUDA kernels, a TensorRT plugin, and a CPU build. Products on CPUs."""
