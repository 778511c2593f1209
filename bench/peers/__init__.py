"""Greedy decoding of one checkpoint by redraft and by its peers, in turns: `python -m redraft.bench.peers`."""
