"""The supervisor inside the job: starts the roles, waits for them, watches them, ends them."""
