"""The words that all of redraft shares: types, tensor names, configuration, errors. Imports no other folder."""

__version__ = "0.1.0"
