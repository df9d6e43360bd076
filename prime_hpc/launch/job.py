"""The function that submitit runs in the job: the supervisor, with the submitting shell's devices.

Kept in a module of its own: submitit stores it by name, and the job imports nothing else of `launch`.
"""

import os


def local_job(run_dir: str, environ: dict[str, str]) -> int:
    """Supervise the run in `run_dir`; returns its exit code.

    Args:
        run_dir: holds `run.yaml`.
        environ: the submitting shell's environment. submitit's LocalExecutor hides all GPUs from a job
            that asked for none, so CUDA_VISIBLE_DEVICES is put back as it was.
    """
    from prime_hpc.supervisor.main import supervise

    if os.getsid(0) != os.getpid():
        os.setsid()  # a Ctrl-C at the terminal reaches the follower, which ends the job in good order
    return supervise(run_dir, environ)
