"""Benchmarks by name: math500, AIME, GSM8K, GPQA, LiveCodeBench, HumanEval; their data, parsers and checkers."""
