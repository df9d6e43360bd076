"""From a checked sweep file to the experiment of every point: resolved, named, hashed.

The experiment file, the overrides and the command line are read and laid once; a point costs about a millisecond.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import ConfigError, Origin
from prime_hpc.config.secret import taken_out
from prime_hpc.config.sections.names import directory_name
from prime_hpc.config.sources.files import Document, parse_yaml, read_documents
from prime_hpc.config.sources.flags import Entry, FileRef, parse_flags
from prime_hpc.config.sources.interpolate import value_at
from prime_hpc.config.sources.load import Loaded, environment_entries, file_entries
from prime_hpc.config.sources.variants import Variants
from prime_hpc.launch.sweep.naming import check_pattern, default_pattern, point_name
from prime_hpc.launch.sweep.spec import Spec, full_key, make_spec, read_spec, refuse_flags_of_axes

NOT_COMPUTED = (
    "name",
    "output_dir",
    "launch",
    "slurm",
    "kubernetes",
    "supervisor",
    "log",
    "wandb",
    "mlflow",
    "tensorboard",
    "prometheus",
    "clean",
)
"""Sections that say where and how a point runs, not what it computes: two points that differ in nothing else are the
same, and a change of them does not make a finished point run again."""
_SWEEP = Origin("default", "sweep")


@dataclass(frozen=True)
class Base:
    """A sweep before its points."""

    spec: Spec
    variants: Variants
    name: str
    sweep_dir: Path
    """Absolute."""

    def stored(self) -> dict[str, Any]:
        """Return what `sweep.yaml` keeps, from which `load_stored` makes the same again without the files it came
        from."""
        file = self.spec.file.model_dump(mode="json", exclude_unset=True, by_alias=True)
        file |= {"name": self.name, "experiment": str(self.spec.experiment.resolve())}
        if "overrides" in file:  # `config` has them all
            file["overrides"] = {
                k: v for k, v in file["overrides"].items() if taken_out({k.rpartition(".")[2]: v})[1] == {}
            }
        config, _ = taken_out(self.variants.stated)
        return {"sweep": file, "config": config, "cwd": str(Path.cwd())}

    def secrets(self) -> dict[str, str]:
        """Texts of what `stored` names as `@secrets/NAME`, by NAME."""
        return taken_out(self.variants.stated)[1]


@dataclass(frozen=True)
class Point:
    """One point of the sweep file as it stands."""

    name: str
    values: dict[str, Any]
    """Full key -> value."""
    hash: str | None
    """Of what it computes; None: the config is not valid."""
    loaded: Loaded | None
    reason: str | None = None


def load_base(path: Path, argv: list[str], environ: Mapping[str, str] = os.environ) -> Base:
    """Read a sweep file, its experiment and a command line.

    Precedence: environment < experiment file < the sweep's overrides < command line < axes.

    `argv`: `--KEY VALUE` of the experiment; `--name` names the sweep.
    Raises ConfigError: something is wrong that concerns every point."""
    spec = read_spec(path)
    parsed = parse_flags(argv, None)
    problems = [*parsed.problems, *refuse_flags_of_axes(parsed.entries, spec)]
    warnings: list[str] = []
    entries = environment_entries(environ, None, warnings)
    refs = [FileRef(spec.experiment), *parsed.files]
    for ref in refs:
        for document in read_documents(ref.path):
            entries += file_entries(ref, document)
    entries += spec.overrides()
    if spec.file.output_dir is not None:
        entries.append(spec.statement(("output_dir",), "output_dir", spec.file.output_dir))
    flags = [entry for entry in parsed.entries if full_key(entry) != "name"]
    names = [str(entry.value) for entry in parsed.entries if full_key(entry) == "name"]
    variants = Variants([*entries, *parsed.switched_on, *flags], problems, warnings)
    if variants.problems:
        raise ConfigError(variants.problems)
    return _base(spec, variants, names[-1] if names else spec.file.name)


def load_stored(sweep_yaml: Path, *, enter: bool = False) -> Base:
    """Return the base that `Base.stored` described.
    `enter`: go to the directory from which the sweep was submitted, where it still is one: relative paths of the
    experiment count from there.
    Raises ConfigError: the file is missing or damaged."""
    try:
        text = sweep_yaml.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{sweep_yaml}: cannot be read: {error.strerror}; is {sweep_yaml.parent} a sweep?") from error
    data, lines = parse_yaml(text, str(sweep_yaml))
    if not isinstance(data.get("sweep"), dict) or not isinstance(data.get("config"), dict):
        raise ConfigError(f"{sweep_yaml} holds no `sweep` and `config`: not written by `sweep submit`")

    if enter and isinstance(data.get("cwd"), str) and Path(data["cwd"]).is_dir():
        sweep_yaml = sweep_yaml.resolve()
        os.chdir(data["cwd"])

    def part(name: str) -> Document:
        return Document(str(sweep_yaml), data[name], {path[1:]: n for path, n in lines.items() if path[0] == name})

    spec = make_spec(data["sweep"], part("sweep"), sweep_yaml.parent)
    variants = Variants(file_entries(FileRef(sweep_yaml), part("config")), is_begun=True)
    if variants.problems:
        raise ConfigError(variants.problems)
    return Base(spec, variants, spec.file.name, sweep_yaml.resolve().parent)


def _base(spec: Spec, variants: Variants, name: str) -> Base:
    try:
        directory_name(name)
    except ValueError as error:
        raise ConfigError(str(error), "name") from error
    parent = Path(str(value_at(variants.stated, ("output_dir",)) or "outputs")).expanduser()
    return Base(spec, variants, name, parent.resolve() / name)


def resolve_points(base: Base) -> list[Point]:
    """Every point's experiment. One that is not valid has a reason and hinders no other. Raises ConfigError: two points
    would have one name, or are the same experiment; the pattern of the names is wrong."""
    drafts = list(base.spec.drafts())
    pattern = base.spec.file.point_name
    if pattern is None:
        pattern = default_pattern(base.spec.keys, [draft.values for draft in drafts])
    else:
        check_pattern(pattern, base.spec.keys)
    parent = Entry(("output_dir",), str(base.sweep_dir), _SWEEP)
    points = []
    for index, draft in enumerate(drafts):
        name = point_name(pattern, draft.values, index)
        entries = (*draft.entries, Entry(("name",), name, _SWEEP), parent)
        try:
            loaded = base.variants.variant(entries)
        except ConfigError as error:
            points.append(Point(name, draft.values, None, None, str(error)))
        else:
            # without defaults: a later version's new key leaves the sums of finished points as they are
            tree = loaded.experiment.model_dump(mode="json", exclude_defaults=True)
            points.append(Point(name, draft.values, config_hash(tree, draft.values), loaded))
    _refuse_collisions(points)
    return points


def config_hash(tree: dict[str, Any], values: Mapping[str, Any]) -> str:
    """Sum of what a point computes (32 hex digits).

    Args:
        tree: the resolved experiment as plain values, without those at their default.
        values: of the axes; one over a key of NOT_COMPUTED makes points different all the same.
    """
    kept = {key: value for key, value in tree.items() if key not in NOT_COMPUTED}
    if isinstance(kept.get("ckpt"), dict):
        kept["ckpt"] = {key: value for key, value in kept["ckpt"].items() if key != "resume_step"}
    asked = {key: value for key, value in values.items() if key.partition(".")[0] in NOT_COMPUTED}
    text = json.dumps([kept, asked], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _refuse_collisions(points: list[Point]) -> None:
    by_name: dict[str, Point] = {}
    by_hash: dict[str, Point] = {}
    for point in points:
        if point.hash and (other := by_hash.setdefault(point.hash, point)) is not point:
            message = f"points {other.name!r} and {point.name!r} are the same experiment"
            raise ConfigError(f"{message}: {other.values} and {point.values}", "axes")
        if (other := by_name.setdefault(point.name, point)) is not point:
            message = f"two points would be named {point.name!r}: {other.values} and {point.values}"
            raise ConfigError(f"{message}; name more axes in it, or {{index}}", "point_name")
