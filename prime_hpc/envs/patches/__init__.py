"""Changes to verifiers, renderers, pydantic and math-verify, in the process that plays episodes."""
