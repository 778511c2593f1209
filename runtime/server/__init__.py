"""An OpenAI-compatible server on top of the runtime."""
