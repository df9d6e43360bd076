"""Shared pieces of the tests: a small tokenizer, a scripted token server, tasksets that misbehave."""
