"""A decoder as a graph: tracing, operators, passes."""
