"""Calls of the verifier on a device, and checks and measurements of them."""
