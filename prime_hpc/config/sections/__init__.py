"""One module a section of the experiment: pydantic models, each key with its default, its limits and its meaning."""
