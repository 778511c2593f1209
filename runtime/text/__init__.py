"""Text in and out: the tokenizer, and chat templates."""
