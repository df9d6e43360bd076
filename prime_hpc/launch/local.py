"""Runs on this machine: in the foreground (`rl`, `sft`), as a local job through submitit, or one role alone."""

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment, Loaded
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import first_port
from prime_hpc.config.run_files import ATTEMPTS_JSONL, LOCK_JSON, RUN_YAML
from prime_hpc.config.secret import masked_command
from prime_hpc.config.site import GENERIC, load_site
from prime_hpc.config.snapshot import RUN_YAML_VARIABLE
from prime_hpc.config.sources.coerce import FALSE, TRUE
from prime_hpc.evals.wanted import is_all_played
from prime_hpc.launch.checks import check
from prime_hpc.launch.fetch.fetch import require_model
from prime_hpc.launch.fetch.presence import absent_models
from prime_hpc.launch.job import local_job
from prime_hpc.launch.lint.lint import lint, print_warnings, refuse_errors
from prime_hpc.launch.lint.lint_finding import Finding
from prime_hpc.launch.monitor.logs import copy_new
from prime_hpc.launch.plan.plan import local_plan
from prime_hpc.launch.plan.plan_text import show_dry_run
from prime_hpc.launch.plan.this_machine import launcher
from prime_hpc.launch.prepare import for_evaluation, prepare_run, refuse_anothers, write
from prime_hpc.runtime.role_context import RESUME_STEP
from prime_hpc.slurm.submission_record import new_token, open_record, submitting
from prime_hpc.store.attempts import is_held, read_attempts
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.errors import StoreError
from prime_hpc.store.messaging.network import Network
from prime_hpc.store.run_dirs import read_json, read_record, read_rows
from prime_hpc.supervisor.attempt.start import run_paths
from prime_hpc.supervisor.roles import ports
from prime_hpc.supervisor.roles.caches import node_caches
from prime_hpc.supervisor.roles.spec import inference_spec, orchestrator_spec, role_gpus, trainer_spec, usable_gpus

POLL_S = 0.3
END_TIMEOUT_S = 30.0
USAGE = ConfigError.exit_code
"""Nothing of the run was begun."""
RESUME = ["--ckpt.resume-step", "latest"]
_RESUME_FLAGS = ("--ckpt.resume-step", "--ckpt.resume_step")
_SAID_ANEW = re.compile(r"--(no-)?(clean|ckpt\.resume[-_]step)(=|$)")
"""Flags that the command that goes on does not repeat."""


def run(loaded: Loaded) -> int:
    """Run an experiment in the foreground; returns the exit code. Raises ConfigError, for what lint calls an error as
    `submit` does."""
    loaded, findings = _looked_at(loaded)
    run_dir = prepare_run(loaded)
    print_warnings(findings)  # no sooner: a model that is missing is an error here
    from prime_hpc.supervisor.main import supervise

    code = supervise(run_dir)
    again = _command_again(deletes=loaded.experiment.clean)
    if code != USAGE and (words := how_to_go_on(loaded.experiment, run_dir, again)):
        print(words, file=sys.stderr)
    return code


def show_run(loaded: Loaded, *, as_json: bool) -> int:
    """Say what `run` would start, and start nothing. Raises as `run`."""
    loaded, findings = _looked_at(loaded)
    print_warnings([] if as_json else findings)
    show_dry_run(local_plan(loaded.experiment, in_foreground=True), None, as_json)
    return 0


def _looked_at(loaded: Loaded) -> tuple[Loaded, list[Finding]]:
    """Return what is to run in the foreground, and what lint finds in it. Raises ConfigError: an error."""
    loaded = for_evaluation(loaded)
    here = loaded.experiment.model_copy(update={"launch": "local"})
    findings = _to_start_now(here, lint(here, GENERIC))  # no site's nodes are asked
    refuse_errors(loaded, findings)
    return loaded, findings


def _to_start_now(experiment: Experiment, findings: list[Finding]) -> list[Finding]:
    """Return findings with an error for each model and benchmark that is not there: nobody brings them meanwhile, as he
    may while a job waits. Who has played all its episodes asks no hub."""
    with suppress(OSError):  # unreadable results are told when they are to be continued
        if not experiment.trains and not experiment.clean and is_all_played(experiment, experiment.run_dir):
            return findings
    absent = absent_models(experiment, os.environ) if any(f.code == "PH329" for f in findings) else set()
    absent |= {f.key for f in findings if f.code == "PH207" and f.key and not f.key.startswith("sft.")}
    codes = ("PH207", "PH329")
    return [replace(f, severity="error") if f.code in codes and f.key in absent else f for f in findings]


def how_to_go_on(experiment: Experiment, run_dir: Path, again: str) -> str:
    """Say how a run on this machine goes on, which nobody starts again; empty where it is complete.
    `again`: the command that goes on from the newest checkpoint."""
    rows = read_rows(run_dir / ATTEMPTS_JSONL)
    if not rows or rows[-1].get("outcome") == "completed":
        return ""
    row = rows[-1]
    has_no_end = row.get("outcome") is None
    if has_no_end and row.get("pid") != os.getpid():  # another one's, which runs
        return ""
    if not experiment.trains or is_parent(experiment):
        return f"the same command{' with --no-clean' if experiment.clean else ''} goes on with what is missing"
    if has_no_end:  # the disk was full: nor does the row say what was saved
        return f"go on from the newest checkpoint: {again}"
    if row.get("saved_step") is None:
        if any(earlier.get("saved_step") for earlier in rows):  # this one ended before it had looked for them
            return f"go on from the newest checkpoint: {again}"
        off = "" if experiment.ckpt is not None else ", for checkpoints are off: `--ckpt` switches them on"
        return f"nothing was saved{off}. To start over: the same command with --clean"
    return f"go on from step {row['saved_step']}: {again}"


def _command_again(*, deletes: bool) -> str:
    """Return this command as it goes on from the newest checkpoint, for the eyes of others. `deletes`: it began with
    `clean`, which a file may say too."""
    words, rest = [], sys.argv[1:]
    while rest:
        word = rest.pop(0)
        if not _SAID_ANEW.match(word):
            words.append(word)
        elif rest and (word in _RESUME_FLAGS or (word == "--clean" and rest[0].lower() in TRUE | FALSE)):
            del rest[0]
    words += RESUME
    words += ["--no-clean"] if deletes else []
    return shlex.join(masked_command([Path(sys.argv[0]).name, *words]))


def submit_local(loaded: Loaded, *, follow: bool | None, dry_run: bool, as_json: bool) -> int:
    """Start an experiment as a job of its own on this machine; see `submission.submit`.

    Ctrl-C while following ends the job in good order, a second one at once.
    """
    loaded = for_evaluation(loaded)
    here = loaded.experiment.model_copy(update={"launch": "local"})
    findings = lint(here, load_site(here.slurm.site))
    findings = findings if dry_run else _to_start_now(here, findings)
    refuse_errors(loaded, findings)
    warned = [] if as_json else findings
    if dry_run:
        print_warnings(warned)
        show_dry_run(local_plan(loaded.experiment), None, as_json)
        return 0
    run_dir = loaded.experiment.run_dir.resolve()
    _refuse_symbols(run_dir)
    refuse_anothers(run_dir)
    with submitting(run_dir):
        prepare_run(loaded)
        print_warnings(warned)
        job = _start(run_dir)
    if as_json:
        print(json.dumps({**(read_record(run_dir) or {}), "run_dir": str(run_dir), "log": str(job.paths.stdout)}))
    else:
        print(f"submitted as local job {job.job_id}: {launcher()}", flush=True)
        print(f"run directory {run_dir}; log {job.paths.stdout}", flush=True)
    if not (follow if follow is not None else not as_json):
        return 0
    import submitit

    try:
        _follow(job.paths.stdout, job)
    except KeyboardInterrupt:
        print("\ninterrupted: ending the job", flush=True)
        for _ in range(2):  # the supervisor heeds a second Ctrl-C as well; a third one ends the waiting alone
            with suppress(KeyboardInterrupt):
                end_local(run_dir, controller=int(job.job_id))
                _follow(job.paths.stdout, job, from_end=True, timeout_s=END_TIMEOUT_S)
                break
        return 130
    try:
        code = int(job.result())
        if words := how_to_go_on(loaded.experiment, run_dir, f"prime-hpc resume {shlex.quote(str(run_dir))}"):
            print(words, flush=True)
        return code
    except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
        print(f"error: the job ended without a result: {error}", file=sys.stderr)
        return 1


def _refuse_symbols(run_dir: Path) -> None:
    """Raise a ConfigError for a path in which submitit would put a job's id."""
    if found := next((symbol for symbol in ("%j", "%t", "%a", "%A") if symbol in str(run_dir)), None):
        words = "which submitit replaces in the paths of a local job: another name or folder, or `rl` in the foreground"
        raise ConfigError(f"{run_dir} holds {found}, {words}", "output_dir")


def start_job(run_dir: Path) -> "submitit.LocalJob[int]":  # type: ignore[name-defined]  # noqa: F821
    """Start a run whose directory is prepared as a local job of submitit's; nothing is written down about it.
    Raises ConfigError: its path holds one of submitit's symbols."""
    import submitit

    _refuse_symbols(run_dir)
    executor = submitit.LocalExecutor(folder=run_dir / "logs" / "submitit")
    # submitit's local jobs end after `timeout_min`, and see no GPU unless told: ours have no limit and see them all
    executor.update_parameters(timeout_min=60 * 24 * 365, stderr_to_stdout=True)
    # inherited by submitit's controller, which would kill the supervisor on the terminal's Ctrl-C (ours ends it),
    # and die with the terminal, which of `ssh -t HOST prime-hpc submit FILE --no-follow` closes as soon as this is done
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        with _output_to(run_dir / "logs" / "submitit" / "controller.log"):
            return executor.submit(local_job, str(run_dir), changed_by_submitit())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Have processes that are started meanwhile write into a file.

    With ours they would keep it open: whoever reads this command through a pipe (`| tee`, `$(...)`) waits for the end
    of all that have it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    with log.open("ab") as file:
        ours = {fd: os.dup(fd) for fd in (1, 2)}
        try:
            for fd in ours:
                os.dup2(file.fileno(), fd)
            yield
        finally:
            for fd, copy in ours.items():
                os.dup2(copy, fd)
                os.close(copy)


def _start(run_dir: Path) -> "submitit.LocalJob[int]":  # type: ignore[name-defined]  # noqa: F821
    job = start_job(run_dir)
    open_record(
        run_dir,
        token=new_token(),
        state="local",
        command=(read_json(run_dir / LOCK_JSON) or {}).get("command") or [],  # without secrets
        layout="local",
        cluster=None,
        job_id=job.job_id,
    )
    return job


def changed_by_submitit() -> dict[str, str | None]:
    """Return the variables that submitit's LocalExecutor changes for a job, as they are here.

    Only this is handed over: submitit keeps its arguments in a file.
    """
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}


def _follow(log: Path, job: "submitit.LocalJob[int]", from_end: bool = False, timeout_s: float | None = None) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Copy the job's log to the terminal until the job is done."""
    offset = log.stat().st_size if from_end and log.exists() else 0
    began = time.monotonic()
    while True:
        done = job.done()
        offset = copy_new(log, offset)
        if done or (timeout_s is not None and time.monotonic() - began > timeout_s):
            return
        time.sleep(POLL_S)


def end_local(run_dir: Path, controller: int | None) -> None:
    """Ask the run's supervisor to end; where it has not begun its attempt, submitit's controller ends the job.
    `controller`: its process, known to be submitit's; None: there is none. That either ends by itself meanwhile does
    not matter."""
    held = [row["pid"] for row in read_attempts(run_dir / ATTEMPTS_JSONL) if is_held(row)]
    for pid in held:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    if not held and controller is not None:
        with suppress(ProcessLookupError):
            os.kill(controller, signal.SIGTERM)


def run_role(loaded: Loaded, role: str) -> int:
    """Run one role in the foreground, by hand: this process becomes the role's.

    The role keeps its own config in `<run>/roles/<role>/`, servers one below it each, so that what is started from
    different files, on several machines at once, shares a run directory without overwriting each other's.
    Raises ConfigError: the experiment cannot run here.
    """
    experiment = loaded.experiment
    check(loaded, role, is_here=True)
    if role != "orchestrator":
        require_model(loaded)
    run_dir = experiment.run_dir.resolve()
    own = run_dir / "roles" / role
    gpus = [] if role == "orchestrator" else role_gpus(experiment, role, usable_gpus(experiment, os.environ))
    within = Network.of(experiment.network.model_dump()).ports
    base = ports.run_base(run_dir, within=within or ports.BUILT_IN)
    if role == "trainer":
        spec = trainer_spec(experiment, run_dir, gpus)
    elif role == "orchestrator":
        spec = orchestrator_spec(experiment, run_dir)
        spec.environment.update(_resume_by_hand(experiment, run_dir))
    else:
        assert experiment.inference is not None
        server = experiment.inference.server
        if experiment.inference.api_key and "inference.server.host" not in loaded.provenance:
            words = "other nodes cannot reach it; --server.host 0.0.0.0"
            print(f"note: listens on {server.host}: {words}", file=sys.stderr)
        port = first_port(experiment, experiment.inference)
        if port and not experiment.inference.headless:  # whose engines' head serves HTTP, elsewhere
            ports.require_free(port, server.host, "inference.server.port")
        port = port or ports.choose(1, base, server.host, within or ports.BUILT_IN)[0]
        engines_port = ports.for_engines(within, base)
        spec = inference_spec(experiment, run_dir, 0, port, gpus, engines_port=engines_port)
        first = experiment.inference.data_parallel_start_rank or 0
        own /= f"rank_{first}" if experiment.inference.headless else f"{socket.gethostname()}_{port}"
    write(loaded, own)
    os.environ.update(node_caches(os.environ))
    os.environ.update(spec.environment, **{RUN_YAML_VARIABLE: str(own / RUN_YAML)})
    sys.stdout.flush()
    os.execv(spec.command[0], spec.command)


def _resume_by_hand(experiment: Experiment, run_dir: Path) -> dict[str, str]:
    """Find where an orchestrator that no supervisor starts goes on: after the step that the trainer by hand resumes
    from. Raises ConfigError: there is no such checkpoint in this run's directory."""
    wanted = experiment.ckpt.resume_step if experiment.ckpt is not None else None
    if wanted is None or RESUME_STEP in os.environ:
        return {}
    if isinstance(wanted, Path):
        message = (
            f"{wanted}: an orchestrator by hand goes on in its own run's directory alone; start from another run's "
            "checkpoint with `rl`, or name a step"
        )
        raise ConfigError(message, "ckpt.resume_step")
    try:
        found = resolve_resume(run_paths(experiment, run_dir).checkpoints, wanted)
    except StoreError as error:
        raise ConfigError(str(error), "ckpt.resume_step") from error
    return {RESUME_STEP: str(found.step)}
