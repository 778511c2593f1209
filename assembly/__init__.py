"""Building engine bundles from checkpoints: above `export` and `engines`, below `bench` and `cli`."""
