"""A teacher that reads the policy's text by its own chat template and tokenizer, and which of its tokens are which of
the policy's."""
