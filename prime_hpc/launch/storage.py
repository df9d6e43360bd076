"""The directories in which a run keeps its files, and their room: looked at before anything starts."""

import json
import tempfile
from pathlib import Path

from prime_hpc.config import Experiment, Problem
from prime_hpc.store.io.disk import free_bytes, size_text
from prime_hpc.store.io.lustre import lack_of_room
from prime_hpc.store.model.files import INDEX, weight_files

MIN_FREE_BYTES = 64 * 2**20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
_MASTER_AND_MOMENTS = 2 * 3
"""A checkpoint over 16-bit weights: float32 master weights and both of Adam's moments."""


def homes(experiment: Experiment) -> dict[str, Path]:
    """Return where a run keeps what its nodes share, by key: its directory, and its checkpoints where they lie
    elsewhere."""
    found = {"output_dir": experiment.run_dir.resolve()}
    if experiment.ckpt is not None and experiment.ckpt.path is not None:
        found["ckpt.path"] = experiment.ckpt.path.resolve()
    return found


def storage_problems(experiment: Experiment, role: str | None, by_slurm: bool) -> list[Problem]:
    """List the homes of a run that cannot be written, or have no room for what it keeps there at once.

    Args:
        role: the one that is started by hand; None: the whole run.
        by_slurm: in a job, whose nodes may see file systems that this machine does not.
    """
    roots = homes(experiment) | {"output_dir": experiment.output_dir}
    away = None
    if role not in (None, "trainer") or (by_slurm and not _is_seen_here(roots.get("ckpt.path"))):
        away = roots.pop("ckpt.path", None)  # other machines', by hand; file systems of compute nodes: preflight's
    if problems := [problem for key, root in roots.items() if (problem := _unwritable(root, key))]:
        return problems
    kept, preflight = _bytes_kept(experiment), experiment.slurm.preflight
    if away is None and len({root.stat().st_dev for root in roots.values()}) == 1:
        kept = dict.fromkeys(kept, sum(kept.values()))
    wants = [
        (key, size, f"the run keeps about {size_text(size)} of weights and checkpoints at once")
        for key, size in kept.items()
    ]
    wants.append(("output_dir", MIN_FREE_BYTES, f"logs and results want {MIN_FREE_BYTES >> 20} MiB"))
    if by_slurm and preflight.enabled:
        asked = f"the job's preflight wants {preflight.min_free_gib:g} GiB (slurm.preflight.min_free_gib)"
        wants.append(("output_dir", round(preflight.min_free_gib * 2**30), asked))
    for key, root in roots.items():
        free, (needed, why) = free_bytes(root), max(want[1:] for want in wants if want[0] == key)
        if free < needed:
            text = f"the file system of {root} has {size_text(free)} free, but {why}"
            problems.append(Problem(f"{text}; free some space or choose another {key}", key))
    if not problems and experiment.ckpt is not None and away is None:  # on Lustre its files lie on single OSTs
        key, root = list(roots.items())[-1]
        ranks = experiment.trainer.num_ranks
        if lack := lack_of_room(root, ranks, weights_bytes(experiment) * _MASTER_AND_MOMENTS // ranks):
            problems.append(Problem(f"{lack}; free some space or choose another {key}", key))
    return problems


def _is_seen_here(root: Path | None) -> bool:
    return root is None or any(path.is_dir() for path in (root, *root.parents[:-1]))


def _unwritable(root: Path, key: str) -> Problem | None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(prefix=".write-test-", dir=root) as probe:  # beside those of other machines
            probe.write(b"x")
    except OSError as error:
        return Problem(f"{root} cannot be written: {error.strerror}", key)
    return None


def _bytes_kept(experiment: Experiment) -> dict[str, int]:
    """By home: weight versions kept, and two checkpoints of float32 master weights and both Adam moments."""
    weights = weights_bytes(experiment) if experiment.trains else 0
    checkpoints = weights * _MASTER_AND_MOMENTS * 2 if experiment.ckpt else 0
    return {"output_dir": weights * (experiment.trainer.keep_weights + 2), "ckpt.path": checkpoints}


def weights_bytes(experiment: Experiment) -> int:
    """Of the model's weight files; 0 where it is not here."""
    folder = Path(experiment.model.name).expanduser()
    if not folder.is_dir():
        return 0
    try:
        stated = json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"]["total_size"]
        if isinstance(stated, int):
            return stated
    except (OSError, ValueError, LookupError, TypeError):
        pass  # none, or without a size, which nothing asks of it; a broken one is reported as such
    try:
        files = weight_files(folder)
    except ValueError:
        files = []
    files = files or [path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES]
    return sum(path.stat().st_size for path in files if path.is_file())
