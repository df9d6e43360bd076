"""A sweep file: read, checked, its axes expanded into points.

name: lr-group
experiment: ../configs/reverse_text/rl.yaml     # relative to the sweep file
overrides: {max_steps: 10}                      # any config key, dotted or nested
axes:
  product: {trainer.optim.lr: [1e-5, 1e-4], orchestrator.rollouts_per_example: [4, 8]}
  zip: {seq_len: [128, 256], trainer.micro_batch_tokens: [4096, 8192]}    # equal lengths
  list: [{async_level: 0}, {async_level: 2}]                             # explicit points
seeds: 3                                        # 0, 1, 2; or a list
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from prime_hpc.config.errors import ConfigError, Origin, Problem, nearest_path
from prime_hpc.config.schema import locate
from prime_hpc.config.secret import taken_out
from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.names import directory_name
from prime_hpc.config.sources.counts import FACTORS, GPU_FLAGS
from prime_hpc.config.sources.files import Document, read_documents
from prime_hpc.config.sources.flags import ALIASES, Entry
from prime_hpc.config.sources.tree import unknown_key

MAX_POINTS = 100_000
_FORMS = {
    "axes.product": "must be a mapping of keys to the lists of their values",
    "axes.zip": "must be a mapping of keys to lists of values, all of one length",
    "axes.list": "must be a list of points, each a mapping of keys to values: [{async_level: 0}, {async_level: 2}]",
}
"""The form of each kind of axes."""
_OURS = ("name", "output_dir", "clean", "ckpt.resume_step", "kind", "slurm.shape", "slurm.shapes")
"""Keys of a point that the sweep itself decides, or that no axis may vary."""


class Axes(Section):
    """Axes of a sweep. Points are product x zip x list x seeds."""

    product: dict[str, Any] = {}
    """Key -> values; every combination."""
    zip: dict[str, Any] = {}
    """Key -> values, all of one length; the i-th of each together."""
    listed: list[dict[str, Any]] = Field([], alias="list")
    """Mappings of keys to values."""


class SweepFile(Section):
    """Content of a sweep file."""

    name: str
    """Name; the sweep's directory is `<output_dir>/<name>`. Default: the file's."""
    experiment: str
    """Experiment file, relative to the sweep file."""
    overrides: dict[str, Any] = {}
    """Keys of every point, over the experiment file."""
    axes: Axes = Axes()
    """The keys that vary."""
    seeds: int | list[int] | None = None
    """One more axis over `seed`: a list, or how many (0, 1, ...)."""
    point_name: str | None = None
    """Pattern of the points' names, `{key}` for a value; default: of the keys that vary."""
    throttle: int | None = Field(None, ge=1)
    """Points that run at once; default: as many as the cluster takes, and one without Slurm."""
    lanes: int | None = Field(None, ge=1)
    """Het layout: jobs that run at once; default: `throttle`."""
    metric: str | None = None
    """Metric of the results; default: reward/mean, for SFT loss."""
    goal: Literal["max", "min"] | None = None
    """The end of the metric that is best; default: min for losses and times."""
    last: int = Field(5, ge=1)
    """The metric's value is its mean over so many last steps (of an evaluation: the last one)."""
    output_dir: str | None = None
    """Parent of the sweep's directory; default: the experiment's."""

    @field_validator("name")
    @classmethod
    def _names_a_directory(cls, name: str) -> str:
        return directory_name(name)


@dataclass(frozen=True)
class PointDraft:
    """One point before its experiment is resolved."""

    values: dict[str, Any]
    """Full key -> value as stated, in the order of the axes."""
    entries: tuple[Entry, ...]
    """The same as statements of the sweep file."""


@dataclass
class Spec:
    """A checked sweep file."""

    file: SweepFile
    document: Document
    """The file with its lines."""
    experiment: Path
    choices: list[list[tuple[Entry, ...]]] = field(default_factory=list)
    """One list an axis; each element is a choice of it: statements that are made together."""

    @property
    def num_points(self) -> int:
        """Points of the sweep."""
        return math.prod(len(choice) for choice in self.choices) if self.choices else 0

    @property
    def keys(self) -> list[str]:
        """Full keys of all axes, in order."""
        return list(dict.fromkeys(full_key(e) for axis in self.choices for choice in axis for e in choice))

    def drafts(self) -> Iterator[PointDraft]:
        """Yield the points in order, the last axis fastest."""
        for combination in itertools.product(*self.choices) if self.choices else ():
            entries = tuple(itertools.chain.from_iterable(combination))
            yield PointDraft({full_key(entry): entry.value for entry in entries}, entries)

    def overrides(self) -> list[Entry]:
        """List what the file states for every point."""
        return [self.statement(("overrides", key), key, value) for key, value in self.file.overrides.items()]

    def statement(self, path: tuple[str, ...], key: str, value: Any) -> Entry:
        """Word what the file states at `path`: that `key` (dotted) is `value`."""
        origin = self.document.origin(path)
        return Entry(tuple(key.split(".")), value, origin, None, None, self.document, path, decides=True)


def is_sweep_file(path: Path) -> bool:
    """Return whether a config file is a sweep rather than an experiment: it names one, or has axes."""
    try:
        return any({"axes", "experiment", "seeds"} & document.data.keys() for document in read_documents(path))
    except ConfigError:
        return False


def read_spec(path: Path) -> Spec:
    """Read a sweep file. Raises ConfigError: it is missing, a key is wrong (with the near match and the axis), nothing
    varies, an axis is empty, or there are more than MAX_POINTS points."""
    documents = read_documents(path)
    data: dict[str, Any] = {"name": path.stem}
    homes: dict[str, Document] = {}
    for document in documents:
        data |= document.data
        homes |= dict.fromkeys(document.data, document)
    # one document for lines and origins: that which states the axes
    home = homes.get("axes", documents[-1])
    return make_spec(data, home, Path(homes.get("experiment", home).name).parent)


def make_spec(data: dict[str, Any], document: Document, folder: Path) -> Spec:
    """Check what a sweep file says (see `read_spec`); `experiment` is relative to `folder`."""
    file = _validate(data, document)
    experiment = Path(file.experiment).expanduser()
    spec = Spec(file, document, experiment if experiment.is_absolute() else folder / experiment)
    problems: list[Problem] = []
    _product(spec, problems)
    _zip(spec, problems)
    _list(spec, problems)
    _seeds(spec, problems)
    _check_keys(spec, problems)
    if problems:
        raise ConfigError(problems)
    if not spec.choices:
        message = "0 points: neither `axes` nor `seeds` states anything that varies"
        raise ConfigError(Problem(message, "axes", Origin("file", document.name)))
    if spec.num_points > MAX_POINTS:
        message = f"{spec.num_points:,} points; at most {MAX_POINTS:,}"
        raise ConfigError(Problem(message, "axes", document.origin(("axes",))))
    return spec


def _validate(data: dict[str, Any], document: Document) -> SweepFile:
    # an empty `axes:` in YAML is null: nothing is stated
    stated = {key: value for key, value in data.items() if value is not None}
    if isinstance(stated.get("axes"), dict):
        stated["axes"] = {key: value for key, value in stated["axes"].items() if value is not None}
    try:
        return SweepFile.model_validate(stated)
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            path = tuple(str(part) for part in detail["loc"])
            message = detail["msg"].replace("Input should", "must")
            if detail["type"] == "extra_forbidden":
                near = nearest_path(".".join(path), _file_keys())
                if path[0] == "axes" and near is None:  # as other sweeps have it
                    near = f"axes.product: {{{'.'.join(path[1:])}: [...]}}"
                message = "unknown key" + (
                    f"; did you mean {near}?" if near else f"; there are {', '.join(_file_keys())}"
                )
            elif detail["type"] == "missing":
                message = "must be stated: it has no default"
            else:
                message = _FORMS.get(".".join(path[:2]), message) if path[0] == "axes" else message
            problems.append(Problem(message, ".".join(path), document.origin(path)))
        raise ConfigError(problems) from error


def _file_keys() -> list[str]:
    return [*SweepFile.model_fields, *(f"axes.{field.alias or name}" for name, field in Axes.model_fields.items())]


def _product(spec: Spec, problems: list[Problem]) -> None:
    for path, key, values in _flat(spec.file.axes.product, ("axes", "product")):
        if _is_list_of_values(values, path, spec, problems):
            spec.choices.append([(spec.statement((*path, str(i)), key, value),) for i, value in enumerate(values)])


def _zip(spec: Spec, problems: list[Problem]) -> None:
    axes = list(_flat(spec.file.axes.zip, ("axes", "zip")))
    sound = [_is_list_of_values(values, path, spec, problems) for path, _, values in axes]
    if not axes or not all(sound):
        return
    lengths = {key: len(values) for _, key, values in axes}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} has {count}" for key, count in lengths.items())
        message = f"axes that are zipped must have as many values each; {told}"
        problems.append(Problem(message, "axes.zip", spec.document.origin(("axes", "zip"))))
        return
    count = next(iter(lengths.values()))
    spec.choices.append(
        [tuple(spec.statement((*path, str(i)), key, values[i]) for path, key, values in axes) for i in range(count)]
    )


def _list(spec: Spec, problems: list[Problem]) -> None:
    if not spec.file.axes.listed:
        if "listed" in spec.file.axes.model_fields_set:
            _empty("axes.list", ("axes", "list"), spec, problems)
        return
    points = []
    for index, item in enumerate(spec.file.axes.listed):
        path = ("axes", "list", str(index))
        points.append(tuple(spec.statement(at, key, value) for at, key, value in _flat(item, path, leaves=True)))
    spec.choices.append(points)


def _seeds(spec: Spec, problems: list[Problem]) -> None:
    seeds = spec.file.seeds
    if seeds is None:
        return
    values = list(range(seeds)) if isinstance(seeds, int) else seeds
    if not values:
        _empty("seeds", ("seeds",), spec, problems)
        return
    spec.choices.append([(spec.statement(("seeds", str(i)), "seed", value),) for i, value in enumerate(values)])


def _flat(
    mapping: dict[str, Any], path: tuple[str, ...], prefix: str = "", leaves: bool = False
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """(path in the file, dotted key, value) of a mapping that may be nested.

    Args:
        mapping: keys to lists of values; with `leaves` to values.
        leaves: go into a mapping only where its key is a section (`{trainer: {optim: ...}}`), for it may be a value.
    """
    for name, value in mapping.items():
        key, at = f"{prefix}{name}", (*path, name)
        node = locate(tuple(key.split("."))) if leaves else None
        if isinstance(value, dict) and (not leaves or (node is not None and node.kind == "section")):
            yield from _flat(value, at, f"{key}.", leaves)
        else:
            yield at, key, value


def _is_list_of_values(values: Any, path: tuple[str, ...], spec: Spec, problems: list[Problem]) -> bool:
    key = ".".join(path)
    if not isinstance(values, list):
        message = f"expected the list of its values, got {values!r}; a key that does not vary belongs in `overrides`"
        problems.append(Problem(message, key, spec.document.origin(path)))
        return False
    if not values:
        _empty(key, path, spec, problems)
        return False
    return True


def _empty(key: str, path: tuple[str, ...], spec: Spec, problems: list[Problem]) -> None:
    problems.append(Problem("0 points: an axis without values", key, spec.document.origin(path)))


def full_key(entry: Entry) -> str:
    """Return the one name of a statement's key, however it was spelled."""
    node = locate(entry.segments)
    return node.dotted if node is not None else ".".join(entry.segments)


def _check_keys(spec: Spec, problems: list[Problem]) -> None:
    """Every axis is over a key that exists, that is not the sweep's own, and over which no other axis goes."""
    seen: dict[str, int] = {}
    for number, axis in enumerate(spec.choices):
        for entry in {".".join(e.segments): e for choice in axis for e in choice}.values():
            where = ".".join(entry.path[:2] if entry.path[0] == "axes" else entry.path[:1])
            problem = _wrong_key(entry, where)
            key = full_key(entry)
            if problem is None and seen.setdefault(key, number) != number:
                problem = Problem(f"{key} is varied by two axes", f"{where}: {'.'.join(entry.segments)}", entry.origin)
            if problem is not None:
                problems.append(problem)
    for entry in spec.overrides():
        if (key := full_key(entry)) in seen:
            message = f"{key} is an axis of the sweep: it cannot be an override too"
            problems.append(Problem(message, f"overrides.{'.'.join(entry.segments)}", entry.origin))


def _wrong_key(entry: Entry, where: str) -> Problem | None:
    key = f"{where}: {'.'.join(entry.segments)}"
    if locate(entry.segments) is None:
        meant = ALIASES.get(".".join(entry.segments).replace("-", "_"))
        if meant is not None:
            return Problem(f"is a flag's name; the key is {'.'.join(meant[0])}", key, entry.origin)
        return Problem(unknown_key(entry).message, key, entry.origin)
    if full_key(entry) in _OURS:
        return Problem("cannot vary: it is the same for all points, or the sweep's own to choose", key, entry.origin)
    if taken_out({full_key(entry).rpartition(".")[2]: entry.value})[1]:
        return Problem("a secret cannot vary: the points' values are for all to read", key, entry.origin)
    return None


def refuse_flags_of_axes(entries: Sequence[Entry], spec: Spec) -> list[Problem]:
    """Problems of command-line flags that state what an axis varies."""
    varied = set(spec.keys)
    problems = [
        Problem(f"{full_key(entry)} is an axis of the sweep: change it in {spec.document.name}", None, entry.origin)
        for entry in entries
        if full_key(entry) in varied
    ]
    for entry in entries:
        section = next((name for name, flag in GPU_FLAGS.items() if flag == entry.origin.where.replace("_", "-")), None)
        for key in (f"{section}.{factor}" for factor in FACTORS if section is not None):
            if key in varied:
                words = f"{key} is an axis of the sweep: state {section}.data_parallel_size of each point instead"
                problems.append(Problem(words, None, entry.origin))
    return problems
