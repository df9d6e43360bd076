"""vLLM as an inference backend: its engines and HTTP application, with our routes, weight updates and adapters."""
