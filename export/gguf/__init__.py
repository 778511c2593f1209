"""GGUF files as checkpoints."""
