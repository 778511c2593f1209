"""Drafters as torch modules and graphs, one file a method; `layer` holds what they share."""
