"""Products over weights of few bits."""
