"""sbatch options that `slurm.extra` may not hold, each with what to state instead. One table for config, lint and plan.

A job of ours runs one task a node, comes back by itself and starts every role with srun: whatever changes the number
of tasks, the script's output, its signals or its life would break it. `SlurmOptions.extra` is checked with it when a
config or a site profile is read; `slurm.options` translates what can be said in other words.
"""

from collections.abc import Mapping

_TASKS = "one task a node is started, and the placement decides how many nodes"
_NODES = "state slurm.trainer.nodes and slurm.inference.nodes"
_GPUS = "state slurm.gpus_per_node (one task a node is started, so a node's GPUs are the task's)"
_LOG = "the job's log is in the run directory (prime-hpc logs RUN --role slurm)"
_SURVIVE = "state slurm.restart.how"
_BOX = "it would put the supervisor into the container; state `container` in the site profile, for the roles"
_HELD = "submit the job, then `scontrol hold` it; a job that comes back must not be held"
_ASKED = "it is of the command `sbatch` itself, not of the job"

REFUSED: dict[str, str] = {
    "nodes": _NODES,
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu"), _TASKS),
    **dict.fromkeys(("ntasks-per-tres", "tasks-per-node"), _TASKS),
    **dict.fromkeys(("gpus", "gpus-per-task", "gpus-per-socket"), _GPUS),
    "tres-per-task": "state slurm.gres and slurm.cpus_per_task",
    "array": "`prime-hpc sweep` makes arrays",
    "hold": _HELD,
    "chdir": "relative paths of the config count from where it is submitted; all others are absolute",
    "cluster": "state slurm.cluster",
    "clusters": "state slurm.cluster",
    "cluster-constraint": "state slurm.cluster",
    "wrap": "the script is rendered; state slurm.setup for lines of your own",
    **dict.fromkeys(("output", "error", "input", "open-mode"), _LOG),
    "job-name": "state slurm.job_name",
    "signal": "state slurm.restart.signal_lead_s",
    **dict.fromkeys(("requeue", "no-requeue"), _SURVIVE),
    "no-kill": "it is set where the layout can lose a node (packed)",
    "kill-on-bad-exit": "the supervisor watches the roles",
    "export-file": "state slurm.env",
    **dict.fromkeys(("het-group", "hetjob"), "state slurm.layout"),
    **dict.fromkeys(("container", "container-id", "runtime", "environment"), _BOX),
    **dict.fromkeys(("container-image", "container-mounts", "container-name", "container-workdir"), _BOX),
    **dict.fromkeys(("parsable", "test-only", "wait", "help", "usage", "version"), _ASKED),
}
"""Long name -> what to do instead."""
TRANSLATED = {"cpus-per-gpu": "cpus_per_task", "mem-per-gpu": "mem"}
"""Asked for by GPU -> the key for the same by node: the script has the product with the GPUs of a node."""
EXPORTS = ("ALL", "NONE", "NIL")
"""Values of --export that a job of ours lives with: roles start with --export=ALL of what the script has."""


def long_name(name: str) -> str:
    """Return an option as Slurm spells it: `--cpus_per_gpu` -> `cpus-per-gpu`."""
    return name.removeprefix("--").replace("_", "-")


def extra_problems(extra: Mapping[str, object]) -> list[str]:
    """Everything that is wrong with an `extra`, in words; false or null takes an option back, which is fine."""
    asked = {long_name(name): value for name, value in extra.items() if value is not None and value is not False}
    return [problem for name, value in asked.items() if (problem := _problem(name, value))]


def _problem(name: str, value: object) -> str | None:
    if name == "export":
        if str(value).upper() in EXPORTS:
            return None
        return "--export takes NONE or ALL here: state slurm.env for variables of your own"
    # sbatch takes any beginning of an option's name that fits one option alone
    meant = name if name in REFUSED else next((known for known in REFUSED if known.startswith(name)), None)
    if meant is None or name in TRANSLATED:
        return None
    return f"--{name} would break the job: {REFUSED[meant]}"
