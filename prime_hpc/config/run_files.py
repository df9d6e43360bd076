"""Names of the files that lie in the root of every run directory, and of its groups of engines, after which their logs
are named. Below the root, `store.run_paths` names the rest.

Whoever only looks at runs needs these and no config: building its classes takes a third of `status`.
"""

from typing import Literal

RUN_YAML = "run.yaml"
"""The resolved experiment."""
LOCK_JSON = "lock.json"
"""Code version, packages and command line."""
SITE_YAML = "site.yaml"
"""The cluster's profile as it was at submission."""
JOB_SBATCH = "job.sbatch"
SHAPES_JSON = "shapes.json"
"""The ranking from which `submit --best` took the run's shape."""
SUBMIT_JSON = "submit.json"
"""The client's record of the newest submission."""
SUBMIT_JOB_JSON = "submit.job.json"
"""The job's own words on that submission: each of the two files has one writer, so that no word is lost."""
ATTEMPTS_JSONL = "attempts.jsonl"
ALARMS_JSONL = "alarms.jsonl"
"""One line for each alarm that fired, and one for each thing that was done about it."""
STATUS_JSON = "status.json"
"""The supervisor's status. (Each role has a `status.json` of its own in its log directory.)"""
SAVE, STOP = "SAVE", "STOP"
"""Files by which anybody has the run saved, or ended after that. The supervisor takes them away."""
TINKER_URL = "tinker.url"
"""The address of a run's tinker service; there only while it answers."""
TINKER_KEY = "tinker.key"
"""The key that it asks for; its user's alone."""

EngineRole = Literal["inference", "teacher", "judge"]
ENGINE_ROLES: tuple[EngineRole, ...] = ("inference", "teacher", "judge")
"""In the order in which they get nodes and GPUs."""
