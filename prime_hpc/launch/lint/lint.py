"""Find what is wrong with an experiment without a cluster: `lint(experiment, site)`.

`submit` refuses an experiment with errors. The rules are in the modules `*_rules` beside this one: each a generator of
findings over one `Subject`, with the kinds of runs that it is for (`rule`).
"""

import sys
from collections.abc import Iterable

from prime_hpc.config import ConfigError, Experiment, Loaded, Problem
from prime_hpc.config.engine_groups import engine_roles, served_by
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.estimate.epochs import with_expected_steps
from prime_hpc.launch.estimate.micro_batch import with_micro_batch
from prime_hpc.launch.estimate.model_facts import read_model
from prime_hpc.launch.for_slurm import is_for_slurm
from prime_hpc.launch.lint import (
    attention_rules,
    backend_rules,
    container_rules,
    effect_rules,
    env_rules,
    file_rules,
    model_rules,
    network_rules,
    own_code_rules,
    parallel_rules,
    run_rules,
    sft_rules,
    sharing_rules,
    slurm_rules,
    time_rules,
    vision_rules,
)
from prime_hpc.launch.lint.lint_finding import CODES, Engines, Finding, Rule, Subject
from prime_hpc.slurm.options import RoleOptions, SlurmRole, resolve
from prime_hpc.slurm.placement import Placement, place_slurm, placed_roles

__all__ = ["CODES", "Finding", "lint", "lint_errors", "lint_pods", "print_warnings", "refuse_errors"]

_ORDER = {"error": 0, "warning": 1, "info": 2}
_MODULES = (
    *(backend_rules, model_rules, vision_rules, attention_rules, parallel_rules, run_rules, sft_rules, env_rules),
    *(own_code_rules, effect_rules, sharing_rules, slurm_rules, container_rules, network_rules, file_rules, time_rules),
)
RULES = {
    f"{module.__name__.rpartition('.')[2]}.{name}": found
    for module in _MODULES
    for name, found in vars(module).items()
    if isinstance(found, Rule)
}
"""Every rule by its name; each says itself which kinds of runs it is for."""


def lint(experiment: Experiment, site: SiteConfig) -> list[Finding]:
    """Everything that can be seen to be wrong, errors first."""
    subject = examine(experiment, site)
    if unknown := list(backend_rules.unknown(subject)):
        return unknown
    found = [finding for rule in RULES.values() if rule.applies(subject) for finding in rule.check(subject)]
    found = list(dict.fromkeys(found))  # roles inherit the same options: what is wrong with one is said once
    # a value that its own rule refuses is also why the roles cannot be placed
    stated = {f.key for f in found if f.severity == "error" and f.code != "PH308"}
    found = [f for f in found if f.code != "PH308" or f.key not in stated]
    return sorted(found, key=lambda f: (_ORDER[f.severity], f.code))


def lint_errors(experiment: Experiment, site: SiteConfig) -> list[Finding]:
    """Return the findings for which `submit` refuses an experiment."""
    return [finding for finding in lint(experiment, site) if finding.severity == "error"]


def print_warnings(findings: Iterable[Finding]) -> None:
    """Tell whoever starts a run what lint warns of."""
    for finding in findings:
        if finding.severity == "warning":
            print(f"warning: {finding.code} {finding.key or ''}: {finding.advice}", file=sys.stderr)


def lint_pods(experiment: Experiment, site: SiteConfig) -> list[Finding]:
    """Return what is wrong with an experiment for pods wherever it is rendered: model, layout, engines, servers."""
    subject = examine(experiment.model_copy(update={"launch": "slurm"}), site)
    rules = [rule for rule in RULES.values() if rule.pods and rule.applies(subject)]
    return [finding for rule in rules for finding in rule.check(subject)]


def refuse_errors(loaded: Loaded, findings: Iterable[Finding]) -> None:
    """Raise a ConfigError for the errors among what was found in an experiment: `submit` does not start it."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise ConfigError(Problem(f"{f.advice} ({f.code})", f.key, loaded.provenance.get(f.key or "")) for f in errors)


def examine(experiment: Experiment, site: SiteConfig) -> Subject:
    """Everything that the checks look at, worked out once."""
    experiment, _ = with_micro_batch(experiment, site if is_for_slurm(experiment, site) else None)
    experiment = with_expected_steps(experiment)
    facts = read_model(experiment.model.name)
    views = {role: served_by(experiment, role) for role in engine_roles(experiment)}
    engines = tuple(Engines(role, view, read_model(view.model.name)) for role, view in views.items())
    if not is_for_slurm(experiment, site):
        return Subject(experiment, site, facts, False, engines=engines)
    placement: Placement | None = None
    misplaced: ConfigError | None = None
    roles: dict[SlurmRole, RoleOptions] = {}
    try:
        for role in placed_roles(experiment):
            roles[role] = resolve(role, experiment, site)
        if experiment.slurm.orchestrator is not None and experiment.kind == "rl":
            roles["orchestrator"] = resolve("orchestrator", experiment, site)
        placement = place_slurm(experiment, site)
    except ConfigError as error:
        misplaced = error
    return Subject(experiment, site, facts, True, placement, misplaced, roles, engines)
