"""Losses of drafting methods, one file a method; the loop knows none of them."""
