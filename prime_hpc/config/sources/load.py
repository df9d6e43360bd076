"""The four sources of a config, laid over each other: command line > files (later wins) > environment > defaults.

`load_experiment` is what every entrypoint calls. Each source is read into entries (`flags`, `files`), each entry
is placed in the tree (`tree.Tree`), the last statement of a key wins, pydantic checks the result, and
everything that is wrong is raised at once as a ConfigError.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prime_hpc.config.errors import ConfigError, Origin, Problem, nearest_path
from prime_hpc.config.experiment import ALONE, Experiment
from prime_hpc.config.schema import all_paths, locate, spelled
from prime_hpc.config.sources.counts import derive_counts, derive_tensor_parallel
from prime_hpc.config.sources.files import Document, read_documents
from prime_hpc.config.sources.flags import SCOPES, Entry, FileRef, parse_flags
from prime_hpc.config.sources.job_shapes import check_shapes, lay_shape
from prime_hpc.config.sources.tree import Tree
from prime_hpc.config.validate import check_complete, check_secrets
from prime_hpc.runtime.gpus import visible_gpus

ENV_PREFIX = "PRIME_"
_OTHERS_VARIABLES = ("PRIME_LOG_LEVEL", "PRIME_API_KEY", "PRIME_BASE_URL", "PRIME_TEAM_ID", "PRIME_INFERENCE_URL")
"""No keys of the config in any scope: `prime_hpc.observe.logs` reads the first, Prime Intellect's own tools the others.
A server's key is `PRIME_INFERENCE__API_KEY`."""
_OF_VLLM = {
    "DATA_PARALLEL_ADDRESS": ("inference", "data_parallel_address"),
    "DATA_PARALLEL_RPC_PORT": ("inference", "data_parallel_rpc_port"),
}
"""Variables that say to a server by hand where the head of its group of engines is."""
KINDS = {name: name for name in ("rl", "sft", *ALONE)}
"""Entrypoints that decide the tree's `kind`."""


@dataclass(frozen=True)
class Loaded:
    """A checked experiment, and where its values come from."""

    experiment: Experiment
    provenance: dict[str, Origin]
    """Dotted path -> where the winning value was stated; keys at their default are absent."""
    argv: list[str]
    entrypoint: str
    warnings: list[str] = field(default_factory=list)
    """News for the user, though nothing is wrong."""
    files: list[str] = field(default_factory=list)
    """Config files that were read, bases included, in the order in which they were laid."""


def load_experiment(
    argv: list[str], entrypoint: str, environ: Mapping[str, str] | None = None, *, is_begun: bool = False
) -> Loaded:
    """Resolve an entrypoint's command line, the files it names and the environment into one experiment.

    Args:
        argv: arguments without the program's name.
        entrypoint: `rl`, `submit` and `plan` take keys from the tree's root; `trainer`, `orchestrator`,
            `inference` and `sft` take those of their own section first.
        is_begun: the files are those of a run that goes on, see `validate.check_complete`.

    Raises:
        ConfigError: with every problem of every source.
    """
    scope = SCOPES.get(entrypoint)
    parsed = parse_flags(argv, scope, positional_files=entrypoint in ("submit", "plan"))
    tree = Tree(parsed.problems)
    if entrypoint == "inference":
        tree.place([Entry(("inference",), True, Origin("default"))])
    if entrypoint in ALONE:  # beside a training run of the default name, not over it
        tree.place([Entry(("name",), entrypoint, Origin("default"))])
    environ = os.environ if environ is None else environ
    if entrypoint == "inference":
        stated = {name: key for name, key in _OF_VLLM.items() if environ.get(name)}
        tree.place([Entry(key, environ[name], Origin("environment", name)) for name, key in stated.items()])
    tree.place(environment_entries(environ, scope, tree.warnings))
    tree.place(parsed.switched_on)
    documents = [(ref, document) for ref in parsed.files for document in _documents(ref, tree.problems)]
    for ref, document in documents:
        tree.place(file_entries(ref, document))
    tree.place(parsed.entries)
    other_kind = list(_other_kind(tree, entrypoint))
    if entrypoint in KINDS:
        tree.place([Entry(("kind",), KINDS[entrypoint], Origin("command line", entrypoint))])
    shapes = lay_shape(tree, parsed.entries)
    is_here = (
        entrypoint in (*ALONE, "inference") and "slurm" not in tree.values and tree.values.get("launch") != "slurm"
    )
    gpus = (lambda: len(visible_gpus(environ))) if is_here else None
    tree.problems += derive_tensor_parallel(tree.values, tree.provenance, gpus)
    tree.problems += derive_counts(tree.values, tree.provenance)
    try:
        experiment = tree.experiment()
        check_shapes(shapes, entrypoint, is_begun=is_begun)
        tree.warnings += check_secrets(experiment, tree.provenance)
        check_complete(experiment, entrypoint, tree.provenance, is_begun=is_begun)
    except ConfigError as error:
        raise ConfigError([*other_kind, *error.problems]) from error
    names = list(dict.fromkeys(document.name for _, document in documents))
    return Loaded(experiment, tree.provenance, list(argv), entrypoint, tree.warnings, names)


def _other_kind(tree: Tree, entrypoint: str) -> Iterator[Problem]:
    """Yield that a config is one for another entrypoint: why all else is wrong with it, where anything is."""
    kind = tree.values.get("kind", entrypoint)
    if entrypoint in KINDS and kind in KINDS and kind != entrypoint:
        words = f"is {kind}, not {entrypoint}: `prime-hpc {kind}` or `prime-hpc submit` runs it"
        yield Problem(words, "kind", tree.provenance.get("kind"))


def _documents(ref: FileRef, problems: list[Problem]) -> list[Document]:
    try:
        documents = read_documents(ref.path)
    except ConfigError as error:
        problems += error.problems
        return []
    if any("experiment" in document.data and {"axes", "seeds"} & document.data.keys() for document in documents):
        file = shlex.quote(str(ref.path))
        words = (
            f"is a sweep, not an experiment: `prime-hpc sweep submit {file} --dry-run` checks it, without it runs it"
        )
        problems.append(Problem(words, None, Origin("file", str(ref.path))))
        return []
    return documents


def file_entries(ref: FileRef, document: Document) -> Iterator[Entry]:
    """Yield a file's statements, each with its line, for the place at which the command line names the file."""
    for name, value in document.data.items():
        origin = document.origin((name,))
        yield Entry((*ref.prefix, name), value, origin, ref.scope, ref.component, document, (name,))


def environment_entries(environ: Mapping[str, str], scope: str | None, warnings: list[str]) -> list[Entry]:
    """Entries of the `PRIME_` variables, shallow ones first.

    Other tools own variables of this prefix: one whose first name is no key is passed over,
    with a warning where it looks like a misspelt key. Ours are in capitals there; keys of a mapping are as typed.
    """
    entries = []
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in (ENV_PREFIX, *_OTHERS_VARIABLES):
            continue
        segments = spelled(tuple(variable[len(ENV_PREFIX) :].split("__")), scope, str.lower)
        if "" in segments:
            continue
        if locate(segments[:1], scope) is None:
            near = nearest_path(segments[0], [path for path in all_paths() if "." not in path])
            if near:
                warnings.append(f"environment variable {variable} is no key of the config; near: {near}")
            continue
        entries.append(Entry(segments, text, Origin("environment", variable), scope))
    return sorted(entries, key=lambda entry: (len(entry.segments), entry.segments))
