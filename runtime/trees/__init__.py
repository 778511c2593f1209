"""Draft trees on the host and on a device, and the offers of drafters."""
