"""Builds engine bundles from checkpoints. It is above `export` and `engines`, below `bench` and `cli`."""
