"""An OpenAI-compatible server on top of the runtime. It needs the extra `serve`."""
