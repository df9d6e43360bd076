"""The job's process: `python -m prime_hpc.supervisor.main RUN_DIR`, and the same as a function.

Exit codes: 0 done, 1 a role failed, 2 the config cannot run here, 66 the run directory is gone, 74 something cannot be
read now, or had no room, 75 of a job: another attempt follows, or has begun already; 130 interrupted.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from loguru import logger

from prime_hpc.client.keys import KEY_VARIABLES
from prime_hpc.config import ConfigError, Experiment, load_run
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import ENGINE_ROLES, SECTIONS, EngineRole, engine_roles, first_port, servers_of
from prime_hpc.config.secret import Secret, revealed
from prime_hpc.config.site import read_site
from prime_hpc.evals.summary import ended_badly
from prime_hpc.evals.wanted import is_all_played
from prime_hpc.inference.backend import engines_title
from prime_hpc.kubernetes.placement import read_nodes
from prime_hpc.observe.bench import tables as bench_tables
from prime_hpc.observe.logs import setup_logger
from prime_hpc.observe.report import write_report
from prime_hpc.runtime.device import NONE_SEEN
from prime_hpc.runtime.limits import lift_limits
from prime_hpc.slurm.allocation import Allocation, held_devices, job_argument
from prime_hpc.slurm.containers import container_of
from prime_hpc.slurm.gpu_split import refuse_cpu_builds
from prime_hpc.slurm.hostlist import compress_hosts
from prime_hpc.slurm.options import Mode
from prime_hpc.slurm.packed_env.facts import SHARED_PYTHON, pack_of, python_words
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.slurm.requeue import leave_out
from prime_hpc.store.attempts import Attempt, is_same_process, read_attempts, rewrite_row, rows_with
from prime_hpc.store.child_runs import list_children, phase_text, read_state
from prime_hpc.store.errors import PROOFS, FencedError, NoRoom, StoreError, Unreadable
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.messaging import network, sockets
from prime_hpc.store.messaging.auth import new_secret
from prime_hpc.store.messaging.network import Network
from prime_hpc.store.messaging.sockets import PortRange
from prime_hpc.store.run_dirs import AttemptRow, SubmissionRecord, read_record
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.tinker_files import adapters_root, count_saves, forget_address
from prime_hpc.supervisor.attempt.bad_nodes import are_avoided, nodes_to_avoid, record_bad_nodes
from prime_hpc.supervisor.attempt.crash_recovery import cancel_stale_steps, close_crashed_attempts
from prime_hpc.supervisor.attempt.device_split import split_line
from prime_hpc.supervisor.attempt.early_end import (
    EXIT_UNREADABLE,
    StartEnded,
    check_stop_request,
    load_patiently,
    requeue_blindly,
    tell_unreadable_apart,
    write_early_end,
)
from prime_hpc.supervisor.attempt.fence import EXIT_GONE
from prime_hpc.supervisor.attempt.in_place import begin_in_place
from prime_hpc.supervisor.attempt.lost_batch_host import Return
from prime_hpc.supervisor.attempt.restart_policy import EXIT_AGAIN, FINAL, decide_for, mode_of_run, return_to_queue
from prime_hpc.supervisor.attempt.start import await_made, begin_attempt, refuse_full, run_paths
from prime_hpc.supervisor.attempt.successor import require_successor
from prime_hpc.supervisor.preflight.phase import Checkup
from prime_hpc.supervisor.roles import ports
from prime_hpc.supervisor.roles.caches import NODE_LOCAL
from prime_hpc.supervisor.roles.process import one_after_another
from prime_hpc.supervisor.roles.slurm_spec import slurm_specs, spare_hosts
from prime_hpc.supervisor.roles.slurm_step import StepContext
from prime_hpc.supervisor.roles.spec import (
    RoleSpec,
    Urls,
    held_by_roles,
    inference_spec,
    orchestrator_spec,
    split_gpus,
    trainer_spec,
    usable_gpus,
)
from prime_hpc.supervisor.roles.srun_environment import for_srun
from prime_hpc.supervisor.stop_requests import Controls, StopRequest
from prime_hpc.supervisor.supervisor import RolePlan, Supervisor

LAST_CALL_S = 60.0
"""Left of the job's time, it asks to be requeued whatever it could not read."""
OF_THE_BATCH_HOST = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def place(experiment: Experiment, run_dir: Path, environ: dict[str, str]) -> tuple[list[RoleSpec], Urls]:
    """Return the roles of a one-node run, and the URLs of the servers of each group of engines.
    Raises ConfigError: too few GPUs, or a port that is taken."""
    serving, training = split_gpus(experiment, usable_gpus(experiment, environ))
    within = Network.of(experiment.network.model_dump()).ports
    base = ports.run_base(run_dir, environ.get("SLURM_JOB_ID"), within or ports.BUILT_IN)
    specs: list[RoleSpec] = []
    urls: Urls = {}
    taken: list[int] = []
    for role in engine_roles(experiment):
        servers = servers_of(experiment, role)
        numbers = _server_ports(experiment, role, base, taken, within)
        taken += numbers
        host = sockets.reached_at(servers.server.host)
        for replica, number in enumerate(numbers):
            own = ports.for_engines(within, base)
            specs.append(inference_spec(experiment, run_dir, replica, number, serving[role][replica], role, own))
        urls[role] = [sockets.http_url(host, number) for number in numbers]
    if experiment.samples and not is_parent(experiment):  # each of its runs gets one when the trainer takes it up
        specs.append(orchestrator_spec(experiment, run_dir))
    if experiment.trains:
        specs.append(trainer_spec(experiment, run_dir, training))
    return specs, urls


def _server_ports(
    experiment: Experiment, role: EngineRole, base: int, taken: list[int], within: PortRange | None
) -> list[int]:
    """Return a port for each server of a group on this machine; `taken` are the other groups'."""
    servers = servers_of(experiment, role)
    first, count, key = first_port(experiment, servers), servers.num_replicas, f"{SECTIONS[role]}.server.port"
    if not first:
        allowed = within or ports.BUILT_IN
        return [ports.choose(1, base, servers.server.host, allowed)[0] for _ in range(count)]
    for number in range(first, first + count):
        if number in taken:
            raise ConfigError(f"{first}: another group of engines listens on {number}; 0 finds a free one", key)
        ports.require_free(number, servers.server.host, key)
    return list(range(first, first + count))


def supervise(run_dir: Path | str, environ: dict[str, str] | None = None, *, in_job: bool = False) -> int:
    """Run one attempt of the run in `run_dir` and return its exit code.

    Args:
        environ: environment of the roles; default this process's.
        in_job: this process is the batch step of a Slurm job: roles are steps on its nodes, or pods, and the job comes
            back by itself as `slurm.restart` says.
    """
    run_dir = Path(run_dir).resolve()
    lift_limits()
    environment = dict(os.environ if environ is None else environ)
    controls: Controls | None = None
    supervisor: Supervisor | None = None
    try:
        experiment = load_patiently(run_dir)
        log = experiment.log
        setup_logger("supervisor", level=log.level, file=run_dir / "logs" / "supervisor.log", json_lines=log.json_lines)
        allocation = read_nodes(environment) if in_job else None
        controls = Controls(run_dir, allocation, experiment.slurm.restart.signal_lead_s)
        controls.install()  # before anything long is read
        patience = Patience(experiment.supervisor.read_timeout_s, on_wait=lambda: check_stop_request(controls))
        supervisor = _prepare(experiment, run_dir, environment, allocation, controls, patience)
    except (Unreadable, NoRoom, OSError) as error:
        if isinstance(error, OSError) and error.errno in PROOFS:
            raise
        words = f"{error}. Nothing whole was deleted; the next attempt goes on from the newest checkpoint"
        request = StopRequest(words, "failed", EXIT_UNREADABLE, False, 0.0)
        return _end_early(run_dir, environment, in_job, request, controls)
    except StartEnded as end:
        return _end_early(run_dir, environment, in_job, end.request, controls)
    except (ConfigError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        logger.error(str(error))  # `logs` shows the file
        return EXIT_AGAIN if in_job and isinstance(error, FencedError) else 2
    finally:
        if controls is not None and supervisor is None:
            controls.restore()
    try:
        code = supervisor.run()
        while supervisor.left is not None and (following := begin_in_place(supervisor, experiment, run_dir, patience)):
            supervisor, code = following, following.run()
    except StartEnded as end:
        return _end_early(run_dir, environment, in_job, end.request, controls)
    finally:
        ports.release(sockets.reserved())
    if code == EXIT_GONE:
        return code  # nothing is left that says how the run went, or how it comes back
    if experiment.trainer.tinker is not None and supervisor.attempt.ended is not None:
        forget_address(run_dir)  # a trainer that was killed could not; a newer attempt's is left alone
    try:
        for line in _summary(experiment, run_dir):
            logger.info(line)
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:  # the job must come back all the same
        logger.warning(f"how the run went cannot be told: {error}")
    if code == 0 and not experiment.trains and (failed := ended_badly(run_dir)):
        # not the run's own failure, after which a job would come back: it is complete, and says little
        logger.error("; ".join(failed))
        code = 1
    if allocation is None:
        return code
    try:
        return _apply_restart_policy(experiment, run_dir, allocation, code, supervisor.attempt, controls)
    except (ConfigError, StoreError, OSError) as error:
        logger.error(f"how the run comes back cannot be read: {error}")
    return _come_back_blindly(experiment, run_dir, environment, supervisor.attempt.outcome, code, controls)


def _summary(experiment: Experiment, run_dir: Path) -> Iterator[str]:
    """Yield what is said at the end of a job, of its last attempt."""
    if experiment.trainer.bench or experiment.orchestrator.bench:
        yield from bench_tables(run_dir)
        return
    if experiment.trainer.tinker is not None:
        yield f"{experiment.name}: {count_saves(run_dir)} saves of its clients' adapters in {adapters_root(run_dir)}"
        return
    if is_parent(experiment):  # which says how each went; its own steps are theirs
        yield f"{experiment.name}: {len(list_children(run_dir))} runs below {run_dir}"
        states = {name: read_state(run_dir / name) for name in list_children(run_dir)}
        yield from (f"{name}: {phase_text(state)}" for name, state in states.items() if state is not None)
        return
    last = read_attempts(RunPaths(run_dir).attempts)[-1]
    is_complete = last["outcome"] == "completed"
    yield from write_report(run_dir, experiment.name, experiment.kind, is_complete=is_complete)
    line = split_line(experiment, run_dir, last["began"] + (last.get("seconds") or {}).get("start", 0.0))
    if line is not None:
        yield line


def _end_early(
    run_dir: Path, environment: dict[str, str], in_job: bool, request: StopRequest, controls: Controls | None
) -> int:
    """End the attempt before any role was started: say why, and have the job come back where it is one."""
    print(f"error: {request.reason}", file=sys.stderr, flush=True)
    logger.error(request.reason)
    experiment: Experiment | None = None
    try:
        experiment = load_run(run_dir)
        own = write_early_end(run_paths(experiment, run_dir), request, job_argument(environment) if in_job else None)
        allocation = read_nodes(environment) if in_job else None
        if allocation is None:
            return request.code
        return _apply_restart_policy(experiment, run_dir, allocation, request.code, own, controls)
    except (ConfigError, StoreError, OSError) as error:
        logger.error(f"that could not be written down: {error}")
    if not in_job:
        return request.code
    return _come_back_blindly(experiment, run_dir, environment, request.outcome, request.code, controls)


def _come_back_blindly(
    experiment: Experiment | None,
    run_dir: Path,
    environment: dict[str, str],
    outcome: str | None,
    code: int,
    controls: Controls | None,
) -> int:
    """Have the job start again though its policy cannot be read, unless it is known to stay ended. Returns the job's
    exit code."""
    how = experiment.slurm.restart.how if experiment is not None else "auto"
    if outcome in FINAL or how == "off":
        return code
    if controls is not None and (final := controls.final_request()) is not None:
        return final.code or code
    if job_argument(environment) is None:
        return EXIT_AGAIN  # upon which the Job starts its pod again
    if how == "successor" or (read_record(run_dir) or {}).get("successor"):
        return EXIT_AGAIN  # upon which it starts; Slurm requeues no job that has one
    return EXIT_AGAIN if requeue_blindly(environment) else code or 1


def _prepare(
    experiment: Experiment,
    run_dir: Path,
    environment: dict[str, str],
    allocation: Allocation | None,
    controls: Controls,
    patience: Patience,
) -> Supervisor:
    """Place the roles and open the attempt.

    Raises:
        Unreadable: what the start reads cannot be read until the deadline.
        StartEnded: somebody wants the attempt to end.
        ConfigError: the nodes, GPUs or ports do not suffice, or another attempt still runs.
        StoreError: the run directory cannot be used.
    """
    site = patience(lambda: read_site(run_dir))
    paths = run_paths(experiment, run_dir)
    patience(lambda: close_crashed_attempts(experiment, run_dir, paths, allocation))
    served = experiment
    if patience(lambda: is_all_played(experiment, run_dir)):
        served = experiment.model_copy(update={"inference": None, "judge_inference": None})  # nobody would ask them
    if allocation is None:
        specs, urls = place(served, run_dir, environment)
        held = held_by_roles(specs)
        _check_devices(experiment, specs, held)
        steps, spares, checkup = None, [], None
        attempt = begin_attempt(experiment, run_dir, patience=patience)
    else:
        placement, held = place_slurm(experiment, site), held_devices(environment, allocation)
        refuse_cpu_builds(site.container is None and any(group.device == "cuda" for group in placement.groups))
        own = slurm_specs(served, site, placement, allocation, run_dir)
        specs, urls = list(own), {}
        spares = spare_hosts(placement, allocation)
        for name in OF_THE_BATCH_HOST:  # a CPU-only component's steps would take them for their own
            environment.pop(name, None)
        environment = for_srun(environment) | revealed({**site.env, **experiment.slurm.env})
        shared_python = environment.pop(SHARED_PYTHON, sys.executable)
        if site.node_local:
            environment.setdefault(NODE_LOCAL, site.node_local)
        steps = StepContext(
            allocation=allocation,
            run_dir=run_dir,
            no_kill=placement.abilities.survives_lost_node or not allocation.by_slurm,
            srun_args=(*site.srun_args, *experiment.slurm.srun_args),
            container=container_of(experiment, site, run_dir, allocation.job_id, environment),
            python=python_words(pack_of(experiment, site), site.node_local, shared_python),
        )
        if allocation.by_slurm:
            mode = patience(lambda: tell_unreadable_apart(lambda: mode_of_run(run_dir)))
            num_nodes = 0 if allocation.is_het else placement.num_nodes
            environment |= _how_agents_return(allocation, environment, mode, num_nodes, are_avoided(experiment, site))
        if experiment.slurm.waits:
            await_made(experiment)
        wanted = allocation.by_slurm and (experiment.slurm.preflight.enabled or site.container is not None)
        patience(lambda: refuse_full(run_dir, experiment.slurm.preflight.min_free_gib if wanted else 0.0))
        attempt = begin_attempt(
            experiment, run_dir, job_id=allocation.job_id, restarts=allocation.restarts, patience=patience
        )
        if allocation.restarts:
            cancel_stale_steps(allocation)
        logger.info(f"job {allocation.job_id} ({placement.layout}): " + _where(specs))
        checkup = Checkup(experiment, steps, own, run_dir / "logs" / f"attempt_{attempt.attempt}") if wanted else None
    attempt.allocated = held or held_by_roles(specs)  # of pods nobody but their roles tells
    environment |= _keys(experiment)
    stated = experiment.network if allocation is None else experiment.network.over(site.network)
    environment |= network.past_proxies(environment)
    environment.pop(network.VARIABLE, None)  # of a run that started this one
    environment |= Network.of(stated.model_dump()).to_env()
    logger.info(
        f"run {run_dir}: attempt {attempt.attempt}, incarnation {attempt.incarnation} ({attempt.why}); "
        + ", ".join(_describe(experiment, spec) for spec in specs)
    )
    plan = RolePlan(one_after_another(specs), urls, environment, steps, spares, checkup)
    return Supervisor(experiment, run_dir, attempt, plan, controls)


def _check_devices(experiment: Experiment, specs: Sequence[RoleSpec], held: Mapping[str, float]) -> None:
    """Refuse GPUs with a torch that is made for CPUs, and say so where it computes on the CPU unasked."""
    refuse_cpu_builds(bool(held))
    computing = dict.fromkeys(spec.name for spec in specs if spec.name in (*ENGINE_ROLES, "trainer"))
    if computing and not held and experiment.device == "auto":
        logger.warning(f"{', '.join(computing)} on the CPU: {NONE_SEEN}")


def _how_agents_return(
    allocation: Allocation, environment: dict[str, str], mode: Mode, num_nodes: int, exclude: bool
) -> dict[str, str]:
    """Return what the agents of a Slurm job need to know to give it back should their supervisor be lost."""
    in_steps = environment.get("SLURM_JOB_ID", allocation.job_id)
    return Return(
        job=allocation.job_id,
        parts=[in_steps, *allocation.component_ids],
        hosts=compress_hosts(allocation.all_hosts),
        batch_host=allocation.batch_host,
        mode=mode,
        num_nodes=num_nodes,
        exclude=exclude,
    ).to_env()


def _keys(experiment: Experiment) -> dict[str, str]:
    """Return the keys of the engines that are started, in variables of their own: the user's (`api_key_var`) hold those
    of servers that others have started. Where the config states none, all get one that is made for this attempt."""
    made = Secret(new_secret()).reveal()
    roles = engine_roles(experiment)
    return {KEY_VARIABLES[role]: revealed(servers_of(experiment, role).api_key) or made for role in roles}


def _where(specs: list[RoleSpec]) -> str:
    return "; ".join(f"{spec.label} on {', '.join(spec.hosts)}" for spec in specs)


def _apply_restart_policy(
    experiment: Experiment,
    run_dir: Path,
    allocation: Allocation,
    code: int,
    own: Attempt,
    controls: Controls | None = None,
) -> int:
    """After the attempt's end: have the job start again where the policy says so. Returns the job's exit code.

    Args:
        own: the attempt. That it could not be written down, on a full disk, changes nothing.
        controls: that listened to the end; a scancel or a STOP that came while it was written down holds as well.

    Raises:
        ConfigError, StoreError, OSError: the policy cannot be read until the deadline.
    """
    paths = run_paths(experiment, run_dir)
    patience = Patience(_patience_s(experiment, controls))
    rows = [] if own.ended is None else patience(lambda: rows_with(paths.attempts, own))
    if rows and rows[-1]["ended"] is None and is_same_process(rows[-1], own):
        rows[-1] = _close_unbegun(paths, rows[-1], own)
    elif not rows or rows[-1]["attempt"] != own.attempt:  # one that was fenced has no end of its own
        logger.warning("a newer attempt of the run has begun: whether the job comes back is for that one to say")
        return EXIT_AGAIN  # no end of the run: pods are not told so, and a successor stays
    last = rows[-1]
    site = patience(lambda: tell_unreadable_apart(lambda: read_site(run_dir)))
    mode = patience(lambda: tell_unreadable_apart(lambda: mode_of_run(run_dir)))
    decision = patience(lambda: decide_for(experiment, run_dir, rows, mode))
    record_bad_nodes(experiment, last)
    if not decision.again:
        if last["outcome"] not in FINAL:
            logger.error(f"the job does not come back: {decision.why}")
        return code
    if controls is not None and (final := controls.final_request()) is not None:
        cause, code = f"{final.reason}; before that: {last['cause']}", final.code or code
        _note(paths, {**last, "outcome": final.outcome, "exit_code": code, "cause": cause, "next": None})
        return code
    is_queued = last["next"] == "slurm"  # again already
    if is_queued and mode != "requeue":
        return EXIT_AGAIN
    logger.info(f"the job comes back ({mode}): {decision.why}")
    if not is_queued:
        _note(paths, {**last, "next": mode})
    if not allocation.by_slurm:
        return EXIT_AGAIN  # upon which the Job starts its pod again
    if mode == "successor" and (refusal := require_successor(run_dir, allocation.job_id, allocation.ends_at)):
        _note(paths, {**last, "next": None, "cause": f"{last['cause']}; no successor waited: {refusal.words}"})
        return code or 1
    bad = nodes_to_avoid(experiment, site, last)
    # of a het job no component can shrink, and each would need its own number
    num_nodes = 0 if allocation.is_het else place_slurm(experiment, site).num_nodes
    if mode == "successor" and (successor := (read_record(run_dir) or SubmissionRecord()).get("successor")):
        leave_out([], successor, bad, num_nodes)

    def send_successor() -> bool:
        if require_successor(run_dir, allocation.job_id, allocation.ends_at) is not None:
            return False
        logger.warning("a successor takes over; slurm.restart.how: successor has one wait from the beginning")
        _note(paths, {**last, "next": "successor"})
        return True

    comes_back = return_to_queue(
        allocation.job_id, mode, num_nodes, bad, restarts=allocation.restarts, if_disabled=send_successor
    )
    if not comes_back and not is_queued:
        why = "Slurm did not requeue the job (see logs/supervisor.log); slurm.restart.how: successor needs no requeue"
        _note(paths, {**last, "next": None, "cause": f"{last['cause']}; {why}"})
        return code or 1
    return EXIT_AGAIN


def _close_unbegun(paths: RunPaths, row: AttemptRow, before: Attempt) -> AttemptRow:
    """Write down the end of an attempt that was to follow in this job, and got no further than its line."""
    cause = f"it could not begin in the job of attempt {before.attempt} (see logs/supervisor.log)"
    closed: AttemptRow = {**row, "ended": time.time(), "outcome": "failed", "exit_code": 1, "cause": cause}
    _note(paths, closed)
    return closed


def _patience_s(experiment: Experiment, controls: Controls | None) -> float:
    """How long what the restart policy reads is waited for: at its time limit the job is over, and cannot come back."""
    left_s = controls.time_left_s if controls is not None else None
    limit_s = experiment.supervisor.read_timeout_s
    return limit_s if left_s is None else max(0.0, min(limit_s, left_s - LAST_CALL_S))


def _note(paths: RunPaths, row: AttemptRow) -> None:
    """Change an attempt's line; a full disk is no reason not to come back."""
    try:
        rewrite_row(paths.attempts, row)
    except (OSError, StoreError) as error:
        logger.warning(f"{paths.attempts} could not be written: {error}")


def _describe(experiment: Experiment, spec: RoleSpec) -> str:
    if spec.name == "trainer":
        return f"trainer with {spec.num_processes} FSDP2 ranks on {spec.device_words}"
    if spec.name in ENGINE_ROLES:
        servers = servers_of(experiment, spec.name)
        engines = spec.num_engines
        what = f"{engines_title(servers)} data-parallel engine{'s' if engines > 1 else ''}"
        return f"{spec.label} with {engines} {what} on {spec.device_words}"
    return spec.label


def main() -> None:
    """Entry point of a job."""
    if len(sys.argv) != 2:
        print("usage: python -m prime_hpc.supervisor.main RUN_DIR", file=sys.stderr)
        sys.exit(2)
    sys.exit(supervise(sys.argv[1]))


if __name__ == "__main__":
    main()
