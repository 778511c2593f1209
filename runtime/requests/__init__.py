"""A request, and the batch of requests that a step works on."""
