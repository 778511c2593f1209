"""Measurements against plain decoding and against peers: each prints what docs/benchmarks.md describes, as JSON too."""
