"""The environment in which srun is called: without the variables that it would take for options of its own.

sbatch sets many of them from the job's options, meant for one task a node of component 0; a shell's start-up file or a
module may set others. A role's step states all that it wants on its command line (`slurm_step.StepContext`).
"""

from collections.abc import Mapping

SRUN_INPUTS = frozenset(
    f"SLURM_{name}"
    for name in (
        *("ACCOUNT", "ACCTG_FREQ", "BCAST", "BCAST_EXCLUDE", "BURST_BUFFER", "CLUSTERS", "CLUSTER_CONSTRAINT"),
        *("COMPRESS", "CONSOLIDATE_SEGMENTS", "CONSTRAINT", "CORE_SPEC", "CPUS_PER_GPU", "CPUS_PER_TASK", "CPU_BIND"),
        *("CPU_BIND_LIST", "CPU_BIND_TYPE", "CPU_BIND_VERBOSE", "CPU_FREQ_REQ", "DEBUG", "DELAY_BOOT", "DEPENDENCY"),
        *("DISABLE_STATUS", "DISTRIBUTION", "DIST_PLANESIZE", "EPILOG", "EXACT", "EXCLUSIVE", "EXPORT_ENV"),
        *("EXTERNAL_LAUNCHER", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GPU_BIND", "GPU_FREQ"),
        *("GRES", "GRES_FLAGS", "HINT", "IMMEDIATE", "KILL_BAD_EXIT", "LABELIO", "MEM_BIND", "MEM_BIND_LIST"),
        *("MEM_BIND_PREFER", "MEM_BIND_TYPE", "MEM_BIND_VERBOSE", "MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE"),
        *("MPI_TYPE", "NCORES_PER_SOCKET", "NO_KILL", "NPROCS", "NSOCKETS_PER_NODE", "NTASKS", "NTASKS_PER_CORE"),
        *("NTASKS_PER_GPU", "NTASKS_PER_NODE", "NTASKS_PER_SOCKET", "NTASKS_PER_TRES", "OOMKILLSTEP", "OPEN_MODE"),
        *("OOM_KILL_STEP", "OVERCOMMIT", "OVERLAP", "PARTITION", "POWER", "PROFILE", "PROLOG", "QOS", "REMOTE_CWD"),
        *("RESERVATION", "RESV_PORTS", "SEND_LIBS", "SIGNAL", "SPREAD_JOB", "SPREAD_SEGMENTS", "SRUN_MULTI"),
        *("STDERRMODE", "STDINMODE", "STDOUTMODE", "STEP_GRES", "TEST_EXEC", "THREADS", "THREADS_PER_CORE"),
        *("THREAD_SPEC", "TIMELIMIT", "TRES_BIND", "TRES_PER_TASK", "UNBUFFEREDIO", "USE_MIN_NODES", "WAIT"),
        *("REQ_SWITCH", "WAIT4SWITCH", "WCKEY", "WORKING_DIR"),
    )
) | frozenset(
    f"SRUN_{name}"
    for name in (
        *("CONTAINER", "CONTAINER_ID", "CONTAINER_TYPE", "CPUS_PER_TASK", "ERROR", "EXPORT_ENV", "INPUT"),
        *("OUTPUT", "RUNTIME", "SEGMENT_SIZE"),
    )
)
"""Input variables of srun in Slurm 20.11 to 26.05 (its manual and its table of options), but for those that say which
job it is in (SLURM_JOB_ID, SLURM_JOB_NUM_NODES, SLURM_JOB_NODELIST, SLURM_JOB_NAME, SLURM_HET_SIZE) and those that a
site sets on purpose (SLURM_NETWORK, which Slingshot's steps need, SLURM_TASK_PROLOG, SLURM_TASK_EPILOG)."""

SET_BY_SBATCH = (
    *("SLURM_CPUS_PER_GPU", "SLURM_CPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_EXACT", "SLURM_EXPORT_ENV"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GRES_FLAGS", "SLURM_HINT"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_NPROCS", "SLURM_NTASKS"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_THREADS_PER_CORE", "SLURM_TRES_PER_TASK"),
)
"""Those of them that sbatch, or Slurm in the batch step, makes from options of ours or of a site."""


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without srun's input variables."""
    return {name: value for name, value in environ.items() if name not in SRUN_INPUTS}
