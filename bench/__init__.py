"""Measurements against plain decoding and against peers: each prints the figures of docs/benchmarks.md, as JSON too."""
