"""Lint of code that a config names by its import path (`module:function`) or file, of its renderer, and of the reward
model that a reward asks: found and read, never imported."""

import ast
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from prime_hpc.config.child_config import is_parent
from prime_hpc.config.env_files import own_rewards
from prime_hpc.config.named_code import find_module
from prime_hpc.config.sections.names import is_import_path
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.rows.reward_calls import is_class, written_signature, wrong_call
from prime_hpc.launch.checks import starts_elsewhere, stated_environments
from prime_hpc.launch.first_rows import columns_of
from prime_hpc.launch.lint.lint_finding import EVERY, Finding, Severity, Subject, rule
from prime_hpc.store.model.config import read_config
from prime_hpc.store.model.files import is_classifier

_REWARD_MODEL = "prime_hpc.envs.rows.reward_model"
_REMEDY = "install the module where the roles run, set PYTHONPATH, or mend the name"


def _named(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield key and import path of a user's own code."""
    orchestrator, curriculum = subject.experiment.orchestrator, subject.experiment.orchestrator.curriculum
    advantage = orchestrator.advantage
    names = [
        ("trainer.loss.type", subject.experiment.trainer.loss.type),
        ("orchestrator.advantage.type", advantage.type),
        ("orchestrator.advantage.echo.filter", advantage.echo.filter if advantage.echo is not None else None),
        *((f"orchestrator.env.{index}.algorithm", env.algorithm) for index, env in enumerate(orchestrator.env)),
        ("orchestrator.curriculum.sampler.type", curriculum.sampler.type),
        *((f"orchestrator.curriculum.gates.{index}.type", gate.type) for index, gate in enumerate(curriculum.gates)),
    ]
    yield from ((key, name) for key, name in names if name is not None and is_import_path(name))


def _defines(tree: ast.Module, name: str) -> bool:
    """Return whether a module may have an attribute: anything in it that is not plain counts as yes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name in (name, "__getattr__"):
                return True
            case ast.Name() if node.id in (name, "globals", "setattr", "exec"):
                return True
            case ast.alias() if "*" in node.name or (node.asname or node.name) == name:
                return True
    return False


def _read(place: str) -> tuple[str, ast.Module] | str | None:
    """Return a module's file and what is written there; a text: why it cannot be imported; None: nobody can tell.
    `place`: its name, or a file of Python."""
    path: str | None = place
    if not place.endswith(".py"):
        try:
            spec = find_module(place)
        except (ImportError, ValueError):  # a module that is loaded and says nothing of where it is from
            return None
        if spec is None:
            here = Path(*place.split(".")).with_suffix(".py")
            aside = (
                f"; {here} is below this directory, where the roles do not look (they start with python -P)"
                if here.is_file()
                else ""
            )
            return f"there is no module {place!r}{aside}"
        path = spec.origin
    if path is None or not path.endswith(".py"):
        return None
    try:
        return path, ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return f"{path} cannot be read as Python: {error}"


def _lack(place: str, attribute: str) -> str | None:
    """Say why code cannot be imported; None: it can, as far as its source tells."""
    read = _read(place)
    if not isinstance(read, tuple):
        return read
    path, tree = read
    if _defines(tree, attribute):
        return None
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    near = get_close_matches(attribute, names, n=1)
    return f"{path} defines no {attribute!r}" + (f"; did you mean {near[0]}?" if near else "")


@rule("rl")
def found(subject: Subject) -> Iterator[Finding]:
    """Code that is not there: an error where the roles run on this machine. A job's script may set a path of its own
    (`setup`, `env`), or start from another Python environment."""
    severity: Severity = "warning" if subject.is_slurm else "error"
    for key, path in _named(subject):
        module, _, attribute = path.partition(":")
        if (lack := _lack(module, attribute)) is not None:
            yield Finding("PH233", severity, key, f"{path!r} cannot be imported: {lack}", _REMEDY)


@rule(*EVERY)
def rewards(subject: Subject) -> Iterator[Finding]:
    """Report reward functions of `rows` that are not where they are said to be, and those that take what none of the
    first rows has: a later one may. A file that is not there is PH207's."""
    experiment = subject.experiment
    if not experiment.samples or is_parent(experiment):
        return
    elsewhere = subject.is_slurm and starts_elsewhere(experiment, subject.site)
    for key, env in stated_environments(experiment):
        for place, name in own_rewards(env.id, env.args):
            is_file = place.endswith(".py")
            if is_file and not Path(place).is_file():
                continue
            if (lack := _lack(place, name)) is not None:
                severity: Severity = "warning" if elsewhere or (subject.is_slurm and not is_file) else "error"
                remedy = "mend the name, or the file" if is_file else _REMEDY
                said = f"reward {name!r} cannot be imported: {lack}"
                yield Finding("PH233", severity, f"{key}.args.reward", said, remedy)
            else:
                for level, wrong, remedy in _wrong_call(place, name, env):
                    severity = "warning" if elsewhere else level
                    yield Finding("PH233", severity, f"{key}.args.reward", wrong, remedy)


def _wrong_call(place: str, name: str, env: EnvConfig) -> Iterator[tuple[Severity, str, str]]:
    """Yield how certain it is that a reward cannot be called, why, and what to do: it is a class, or takes what no
    reply has, as far as its source and the first rows tell."""
    read = _read(place)
    if not isinstance(read, tuple):
        return
    if is_class(read[1], name):
        yield "error", f"reward {name!r} is a class, and is to be a function", "name a function, which may make one"
        return
    columns, is_all = columns_of(env.args.get("files"))
    signature = written_signature(read[1], name) if columns else None
    if signature is not None and (wrong := wrong_call(name, signature, columns)):
        yield "error" if is_all else "warning", wrong, "rename the parameter, or give it a default"


@rule(*EVERY)
def renderer(subject: Subject) -> Iterator[Finding]:
    """Report a renderer that the installed `renderers` package does not have: no environment would begin."""
    experiment, name = subject.experiment, subject.experiment.model.renderer
    if not experiment.samples or name == "auto":
        return
    read = _read("renderers.configs")
    if not isinstance(read, tuple):
        return
    fields = [node for node in ast.walk(read[1]) if isinstance(node, ast.AnnAssign)]
    literals = [node.annotation for node in fields if isinstance(node.target, ast.Name) and node.target.id == "name"]
    constants = [node.value for literal in literals for node in ast.walk(literal) if isinstance(node, ast.Constant)]
    if (known := sorted({str(value) for value in constants})) and name not in known:
        elsewhere = subject.is_slurm and starts_elsewhere(experiment, subject.site)
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        remedy = f"{hint}there are {', '.join(known)}"
        message = f"the `renderers` package has no {name!r}"
        yield Finding("PH233", "warning" if elsewhere else "error", "model.renderer", message, remedy)


@rule(*EVERY)
def asked_reward_model(subject: Subject) -> Iterator[Finding]:
    """Report the shipped reward of a reward model where nothing would answer it: every episode would fail. A judge of
    another kind than its runner is PH131's."""
    asking = [
        f"{where}.args.reward"
        for where, env in (() if is_parent(subject.experiment) else stated_environments(subject.experiment))
        if any(place == _REWARD_MODEL for place, _ in own_rewards(env.id, env.args))
    ]
    if not asking:
        return
    judge = subject.experiment.judge_inference
    if judge is None:
        shell = [*subject.site.setup, *subject.experiment.slurm.setup] if subject.is_slurm else []
        if "JUDGE_URL" not in subject.environ and not any("JUDGE_URL" in line for line in shell):
            remedy = "judge_inference: {model: ..., runner: pooling}, or the address of a running one in JUDGE_URL"
            remedy += " (slurm.env)" if subject.is_slurm else ""
            yield Finding.error("PH238", asking[0], "no reward model is there for it to ask", remedy)
    elif judge.runner != "pooling" and not is_classifier(read_config(judge.model, subject.environ) or {}):
        remedy = "runner = pooling with a reward model, or a reward function that asks for a reply"
        message = f"{asking[0]} asks for scores, and this judge replies"
        yield Finding.error("PH238", "judge_inference.runner", message, remedy)
