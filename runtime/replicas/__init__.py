"""Several runtimes behind one address: each replica is a process with a runtime, and one gateway asks all of them."""
