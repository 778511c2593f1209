"""The words that every part of redraft shares: types, tensor names, configuration, errors. Imports nothing of ours."""

__version__ = "0.1.0"
