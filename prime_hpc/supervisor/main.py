"""What the job runs: `python -m prime_hpc.supervisor.main RUN_DIR`, and the same as a function.

Called by `launch` (in the foreground, or through submitit) and by a Slurm batch script.
Exit codes: 0 done, 1 a role failed, 2 the config cannot run here, 130 interrupted.
"""

import os
import sys
from pathlib import Path

from loguru import logger

from prime_hpc.config import ConfigError, Experiment, load_run
from prime_hpc.observe.logs import setup_logger
from prime_hpc.observe.report import write_report
from prime_hpc.store.errors import StoreError
from prime_hpc.supervisor import ports
from prime_hpc.supervisor.begin import begin_attempt
from prime_hpc.supervisor.roles import (
    RoleSpec,
    inference_spec,
    orchestrator_spec,
    split_gpus,
    trainer_spec,
    visible_gpus,
)
from prime_hpc.supervisor.supervise import Supervisor


def place(experiment: Experiment, run_dir: Path, environ: dict[str, str]) -> tuple[list[RoleSpec], list[str]]:
    """The roles of a one-node run and the URLs of its servers.

    Raises:
        ConfigError: too few GPUs, or a port that is taken.
    """
    gpus = visible_gpus(environ)
    serving, training = split_gpus(experiment, gpus)
    base = ports.run_base(run_dir, environ.get("SLURM_JOB_ID"))
    specs: list[RoleSpec] = []
    urls: list[str] = []
    used = 0
    if experiment.kind == "rl":
        if experiment.inference is not None:
            server = experiment.inference.server
            count = experiment.inference.num_replicas
            if server.port:
                numbers = [server.port + i for i in range(count)]
                for number in numbers:
                    ports.require_free(number, server.host, "inference.server.port")
            else:
                numbers = ports.choose(count, base, server.host)
                used = count
            host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
            for replica, number in enumerate(numbers):
                specs.append(inference_spec(experiment, run_dir, replica, number, serving[replica]))
                urls.append(f"http://{host}:{number}/v1")
        specs.append(orchestrator_spec(experiment, run_dir))
    (rendezvous,) = ports.choose(1, base + used + 1)
    specs.append(trainer_spec(experiment, run_dir, training, rendezvous))
    return specs, urls


def supervise(run_dir: Path | str, environ: dict[str, str] | None = None) -> int:
    """Run one attempt of the run in `run_dir` and return its exit code.

    Args:
        run_dir: holds `run.yaml`.
        environ: environment of the roles; default this process's.
    """
    run_dir = Path(run_dir).resolve()
    environment = dict(os.environ if environ is None else environ)
    try:
        experiment = load_run(run_dir)
        log = experiment.log
        setup_logger("supervisor", level=log.level, file=run_dir / "logs" / "supervisor.log", json_lines=log.json_lines)
        specs, urls = place(experiment, run_dir, environment)
        attempt = begin_attempt(experiment, run_dir)
        inference = experiment.inference
        if experiment.kind == "rl" and inference is not None and inference.api_key:
            environment[experiment.orchestrator.client.api_key_var] = inference.api_key
    except (ConfigError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    logger.info(
        f"run {run_dir}: attempt {attempt.attempt}, incarnation {attempt.incarnation} ({attempt.why}); "
        + ", ".join(_describe(experiment, spec) for spec in specs)
    )
    code = Supervisor(experiment, run_dir, attempt, specs, urls, environment).run()
    for line in write_report(run_dir, experiment.name, experiment.kind):
        logger.info(line)
    return code


def _describe(experiment: Experiment, spec: RoleSpec) -> str:
    if spec.name == "trainer":
        return f"trainer with {spec.num_processes} FSDP2 ranks"
    if spec.name == "inference" and experiment.inference is not None:
        return f"{spec.label} with {experiment.inference.data_parallel_size} vLLM data-parallel engines"
    return spec.label


def main() -> None:
    """Entry point of a job."""
    if len(sys.argv) != 2:
        print("usage: python -m prime_hpc.supervisor.main RUN_DIR", file=sys.stderr)
        sys.exit(2)
    sys.exit(supervise(sys.argv[1]))


if __name__ == "__main__":
    main()
