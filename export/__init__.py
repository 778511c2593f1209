"""A Hugging Face checkpoint to an ONNX graph and its weights; the home of torch."""
