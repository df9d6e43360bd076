"""Lint of environments: those that are not installed, arguments, fields and data that they do not have, cores for the
processes that play episodes, and addresses that nobody would use."""

import os
from collections.abc import Iterator, Sequence

from prime_hpc.config.child_config import is_parent
from prime_hpc.config.env_files import short_id
from prime_hpc.config.named_code import ALGORITHMS
from prime_hpc.config.sections.orchestrator import EnvConfig, EnvServersConfig
from prime_hpc.envs.bundled_arguments import task_fields
from prime_hpc.launch.checks import missing_environments, starts_elsewhere, unknown_arguments, unread_rows
from prime_hpc.launch.fetch.needs import benchmarks_of
from prime_hpc.launch.fetch.presence import job_environ, look
from prime_hpc.launch.lint.lint_finding import EVERY, Finding, Severity, Subject, rule
from prime_hpc.store.dataset.files import NothingThereError
from prime_hpc.store.model.config import is_on

_OF_EVERY_TASK = ("idx", "name", "description", "prompt", "system_prompt")
"""Fields of verifiers' own `TaskData` that could be shown."""


def _playing(subject: Subject) -> tuple[str, EnvServersConfig, Sequence[EnvConfig]]:
    """Return the section that states them, what it states, and its environments (of `eval`, those with arguments)."""
    experiment = subject.experiment
    if experiment.trains:
        return "orchestrator", experiment.orchestrator.env_servers, experiment.orchestrator.env
    return experiment.kind, experiment.episodes.env_servers, experiment.episodes.env


def _num_cores(subject: Subject) -> int | None:
    """CPUs of the node that plays; None: nobody says."""
    if not subject.is_slurm:
        return len(os.sched_getaffinity(0))
    role = next((name for name in ("orchestrator", "trainer", "inference") if name in subject.roles), None)
    if role is None:
        return None
    options = subject.roles[role].options
    if asked := options.get("cpus-per-task"):
        return int(str(asked))
    sizes = [part.cpus_per_node for part in subject.facts_of(role)] if "exclusive" in options else []
    return min((size for size in sizes if size is not None), default=None)


@rule("rl", "eval", "synthesize")
def workers(subject: Subject) -> Iterator[Finding]:
    """Workers that would share cores, and addresses at which none is started."""
    section, servers, environments = _playing(subject)
    stated = [servers.workers if env.workers is None else env.workers for env in environments] or [servers.workers]
    if servers.addresses:
        if not any(stated):
            yield Finding.error(
                "PH231",
                f"{section}.env_servers.addresses",
                "no environment has workers (workers = 0): all would be played in the orchestrator's process, and "
                "nothing there",
                f"{section}.env_servers.workers: a number, or auto with max_workers; or take the addresses out",
            )
        return
    own = subject.experiment.slurm.orchestrator
    if subject.is_slurm and own is not None and (own.nodes or 1) > 1:
        return  # they are on nodes of their own
    wanted, cores = sum(count for count in stated if isinstance(count, int)), _num_cores(subject)
    if wanted and cores is not None and wanted >= cores:
        yield Finding.warning(
            "PH230",
            f"{section}.env_servers.workers",
            f"{wanted} workers, and the orchestrator beside them, on a node with {cores} CPUs: they take turns",
            "fewer, more CPUs for the node (slurm.cpus_per_task), or hosts elsewhere (addresses)",
        )


@rule(*EVERY)
def installed(subject: Subject) -> Iterator[Finding]:
    """Environments that are not installed: an error where they are played from this Python environment. Silent where
    verifiers is not installed: a login node without the roles' packages cannot tell."""
    experiment = subject.experiment
    if not experiment.samples or is_parent(experiment):
        return
    elsewhere = subject.is_slurm and starts_elsewhere(experiment, subject.site)
    severity: Severity = "warning" if elsewhere or _playing(subject)[1].addresses else "error"
    remedy = "mend the id, or install it where the episodes are played"
    for problem in missing_environments(experiment):
        yield Finding("PH232", severity, problem.key, problem.message, remedy)


@rule(*EVERY)
def arguments(subject: Subject) -> Iterator[Finding]:
    """Report arguments that a bundled environment does not have: it would not begin."""
    experiment = subject.experiment
    if experiment.samples and not is_parent(experiment):
        # another version, perhaps; or rows that another job makes anew
        elsewhere = subject.is_slurm and (starts_elsewhere(experiment, subject.site) or experiment.slurm.waits)
        severity: Severity = "warning" if elsewhere else "error"
        for problem in unknown_arguments(experiment):
            yield Finding("PH236", severity, problem.key, problem.message, "mend it, or leave it out")


@rule("rl")
def demonstrations(subject: Subject) -> Iterator[Finding]:
    """Report a field to show the teacher that no task of a bundled environment has: the run would end at its start."""
    config = subject.experiment.orchestrator
    algorithm, shown = ALGORITHMS.get(config.advantage.type), config.advantage.demonstration
    if algorithm is None or algorithm.teacher != "self" or is_parent(subject.experiment):
        return
    elsewhere = subject.is_slurm and starts_elsewhere(subject.experiment, subject.site)
    for env in config.env:
        fields = task_fields(short_id(env.id))
        if fields is None or shown in (*_OF_EVERY_TASK, *fields):
            continue
        yield Finding(
            "PH225",
            "warning" if elsewhere else "error",
            "orchestrator.advantage.demonstration",
            f"tasks of {env.id} have no {shown!r} to show the teacher: their own fields are "
            f"{', '.join(fields) or 'none'}",
            "name the one that shows the solution, or choose another algorithm",
        )


@rule(*EVERY)
def rows(subject: Subject) -> Iterator[Finding]:
    """Report files that the environments `rows` and `prompts` are given and that are not there, or hold no rows."""
    experiment = subject.experiment
    if experiment.samples and not is_parent(experiment):
        for key, error in unread_rows(experiment):
            if isinstance(error, NothingThereError):
                yield Finding.warning("PH207", key, str(error), "make it before submit, or mend the path")
            elif subject.is_slurm and experiment.slurm.waits:
                yield Finding.warning("PH207", key, str(error), "the job that this one waits for has to mend it")
            else:
                yield Finding.error("PH207", key, str(error), "")


@rule(*EVERY)
def benchmarks(subject: Subject) -> Iterator[Finding]:
    """Report benchmarks whose data is neither on disk nor fetched by the role that plays them: it is of a package, or
    is to be in a place that is stated, or the environment here keeps roles off the hub (of a job's that is PH329)."""
    experiment = subject.experiment
    if not experiment.samples or is_parent(experiment):
        return
    environ = job_environ(experiment, subject.site) if subject.is_slurm else os.environ
    is_offline = not subject.is_slurm and is_on(environ, "HF_HUB_OFFLINE")
    for need in benchmarks_of(experiment):
        found = look(need, environ)
        if found.is_there or (found.can_fetch and not need.data and not is_offline):
            continue
        where = f"not in {found.path}" if found.path is not None else "not there"
        fetched = "`prime-hpc fetch FILE` brings it" if found.can_fetch else ""
        yield Finding.warning(
            "PH207",
            need.key,
            f"the data of the benchmark {need.name} is {where}, and no role fetches it",
            "; ".join(filter(None, [fetched, found.remedy])),
        )


@rule(*EVERY)
def keys(subject: Subject) -> Iterator[Finding]:
    """Variables with a key that are not set: of servers where one was named on purpose, for every request would be
    refused; of hosts that play episodes, without which the run ends at its start."""
    known = {**os.environ, **subject.experiment.slurm.env, **subject.site.env}
    named = {
        f"{key}.api_key_var": client.api_key_var
        for key, client in subject.attached.items()
        if client.api_key_var != type(client).model_fields["api_key_var"].default
    }
    if subject.experiment.samples and not is_parent(subject.experiment):
        section, hosts, _ = _playing(subject)
        named |= {f"{section}.env_servers.key_var": hosts.key_var} if hosts.addresses else {}
    for key, name in named.items():
        if not known.get(name):
            remedy = f"export {name}=... first" + (f", or slurm.env.{name} = @FILE" if subject.is_slurm else "")
            yield Finding.warning("PH235", key, f"the variable {name} is not set here", remedy)
