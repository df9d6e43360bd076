"""Weight versions on disk: which there are, and which may go.

A version is an artifact `weights/step_<v>` that Hugging Face loads as it is (config.json, tokenizer files,
model.safetensors or shards with an index) plus manifest.json. The trainer publishes versions through
`prime_hpc.store.artifact` (rank-parallel stage) and calls `prune_weights`; engines and orchestrator read them.

Or it holds only what changed (`weights.transport: delta`). Its manifest says in `meta` under `delta` against which
version it stands (`base`, with the digest of that one's manifest), and at which whole version this chain begins
(`whole`). The digest of a version covers its base's, so it names the whole content: a version of the same number from
another attempt is not mistaken for it.

Or it holds no weights at all (`weights.transport: gloo`, `nccl`): they went to the engines over the network. Then the
newest version that does hold them stays.
"""

import contextlib
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config.named_code import NETWORK_TRANSPORTS
from prime_hpc.store.artifact import clear_name, discard, is_artifact
from prime_hpc.store.checkpoint.checkpoints import oldest_of_newest_whole, read_saved
from prime_hpc.store.errors import ArtifactError, Unreadable
from prime_hpc.store.leases import min_floor
from prime_hpc.store.manifest import Manifest, read_manifest, verify_artifact
from prime_hpc.store.run_paths import RunPaths, check_incarnation, list_steps, step_name

KEY = "delta"


@dataclass(frozen=True)
class Link:
    """The place of a version that holds changes in its chain."""

    base: int
    """Version against which it stands."""
    digest: str
    """Of that version's manifest."""
    whole: int
    """Version at which the chain begins."""

    def as_json(self) -> dict[str, Any]:
        """For the manifest's `meta`."""
        return {"base": self.base, "digest": self.digest, "whole": self.whole}


def link_of(manifest: Manifest) -> Link | None:
    """Return a version's link; None for a version that is whole.
    Raises ValueError: the manifest says something else there."""
    said = manifest.meta.get(KEY)
    if said is None:
        return None
    try:
        return Link(int(said["base"]), str(said["digest"]), int(said["whole"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"version {manifest.version} does not say what it is a change of ({error})") from error


def holds_weights(manifest: Manifest) -> bool:
    """Return whether a version's weights are in files: False where they went over the network alone."""
    return manifest.meta.get("transport") not in NETWORK_TRANSPORTS


def went_over_network(folder: Path) -> bool:
    """Return whether a directory is a version without its weights; False where that cannot be told."""
    try:
        return not holds_weights(read_manifest(folder))
    except (ArtifactError, Unreadable):
        return False


def holds_changes(folder: Path) -> bool:
    """Return whether a directory is a version that holds only what changed; False where that cannot be told."""
    try:
        return link_of(read_manifest(folder)) is not None
    except (ArtifactError, Unreadable, ValueError):
        return False


def read_chain(folder: Path, *, deadline_s: float = 0.0) -> list[tuple[Path, Manifest]]:
    """Return the versions that make up one: a whole version first, then the changes, itself last.

    Args:
        folder: of the version; the others lie beside it.
        deadline_s: keep trying this many seconds for each.

    Raises:
        ArtifactError: one is gone, damaged, or of another content.
        Unreadable: one cannot be read now.
    """
    manifest = verify_artifact(folder, deadline_s=deadline_s)
    if not holds_weights(manifest):
        raise ArtifactError(folder, "a version with its weights", "one that went to the engines over the network alone")
    chain = [(folder, manifest)]
    while (link := _link(folder, manifest)) is not None:
        base_folder = folder.with_name(step_name(link.base))
        try:
            found = verify_artifact(base_folder, deadline_s=deadline_s)
        except ArtifactError as error:
            raise ArtifactError(
                error.file, f"{error.expected} ({folder.name} holds only what changed since)", error.found
            ) from error
        if found.digest != link.digest:
            raise ArtifactError(
                base_folder,
                f"the version that {folder.name} is a change of ({link.digest})",
                f"another ({found.digest})",
            )
        folder, manifest = base_folder, found
        chain.insert(0, (folder, manifest))
    return chain


def _link(folder: Path, manifest: Manifest) -> Link | None:
    try:
        link = link_of(manifest)
    except ValueError as error:
        raise ArtifactError(folder, "a version with its base", str(error)) from error
    if link is not None and manifest.version is not None and link.base >= manifest.version:
        raise ArtifactError(folder, f"a base older than version {manifest.version}", f"version {link.base}")
    return link


def list_versions(paths: RunPaths) -> list[int]:
    """Sorted versions on disk (version 0 is the base model and not among them, unless it was published)."""
    return list_steps(paths.weights)


def newest_of_attempt(paths: RunPaths, above: int, incarnation: int) -> int | None:
    """Return the newest version above `above` that this attempt (or a newer one) has made; None where there is none, or
    none can be seen now.

    A fenced attempt may have left a late one of a higher number, which nobody may wait for.
    """
    try:
        versions = list_versions(paths)
    except OSError as error:  # whoever looks for the next version looks again
        logger.warning(f"{paths.weights} cannot be listed: {error.strerror}")
        return None
    for version in reversed([v for v in versions if v > above]):
        try:
            if read_manifest(paths.weights_step(version)).incarnation >= incarnation:
                return version
        except (ArtifactError, Unreadable) as error:
            logger.debug(f"weights version {version} cannot be read yet: {error}")
    return None


def prune_weights(paths: RunPaths, keep_last: int, incarnation: int = 0, *, keep: Collection[int] = ()) -> list[int]:
    """Delete the versions that nobody needs. One process calls it: trainer rank 0, after it published a version.

    Kept are the newest `keep_last` whole versions and everything newer than the oldest of them, versions at or above
    the lowest lease floor, version n of every checkpoint n, and `keep`; and of each that holds only what changed, its
    chain.

    Args:
        keep_last: at least 1.
        keep: further versions to spare.

    Raises:
        FencedError: a newer attempt has begun.
        ValueError: `keep_last` below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, is {keep_last}: the engines need the newest version")
    check_incarnation(paths, incarnation)
    versions = list_versions(paths)
    newest_kept = oldest_of_newest_whole(paths, versions, keep_last, paths.weights_step)
    if newest_kept is None:
        return []
    floor = min_floor(paths)
    # A checkpoint's name appears in one rename with all its content, so the name alone protects: cheap, and a damaged
    # checkpoint protects too much rather than too little.
    checkpoints = list_steps(paths.checkpoints, digits=0)
    if not checkpoints and (saved := read_saved(paths)) is not None and saved.step:
        logger.warning(f"{paths.checkpoints} lists not even step {saved.step}: no weight version is removed")
        return []
    protected = set(checkpoints) | set(keep)
    limit = newest_kept if floor is None else min(newest_kept, floor)
    candidates = [v for v in versions if v < limit and v not in protected]
    needed = _in_chains(paths, versions, set(candidates))
    needed |= _newest_with_weights(paths, versions)
    to_delete = [v for v in candidates if v not in needed and is_artifact(paths.weights_step(v))]
    for version in to_delete:
        discard(paths, paths.weights_step(version), incarnation)
    if to_delete:
        logger.debug(f"removed weight versions {to_delete}")
    return to_delete


def _in_chains(paths: RunPaths, versions: Sequence[int], candidates: Set[int]) -> set[int]:
    """Return the candidates that belong to the chain of a version that is kept.

    Only a version right above a candidate can need it, so few manifests are read: none where all versions are whole
    and nothing is left to delete. One that cannot be read protects everything below it.
    """
    needed: set[int] = set()
    for below, version in pairwise(versions):
        if version in candidates or below not in candidates:
            continue
        try:
            link = link_of(read_manifest(paths.weights_step(version)))
            first = version if link is None else link.whole
        except (ArtifactError, Unreadable, ValueError) as error:
            logger.warning(f"weights version {version} may need older ones, which stay: {error}")
            first = 0
        needed |= {v for v in candidates if first <= v < version}
    return needed


def _newest_with_weights(paths: RunPaths, versions: Sequence[int]) -> set[int]:
    """Return the newest version whose weights are in files, if there is one: what an engine falls back to."""
    for version in reversed(versions):
        with contextlib.suppress(ArtifactError, Unreadable):
            if holds_weights(read_manifest(paths.weights_step(version))):
                return {version}
    return set()


def newest_with_weights(paths: RunPaths) -> int | None:
    """Return the newest version whose weights are in files; None where there is none."""
    return max(_newest_with_weights(paths, list_versions(paths)), default=None)


def remove_versions_after(paths: RunPaths, version: int, incarnation: int = 0) -> list[int]:
    """Delete the versions above `version`: a run resumed there makes them anew. Supervisor only."""
    removed = [v for v in list_versions(paths) if v > version]
    for v in reversed(removed):
        clear_name(paths, paths.weights_step(v), incarnation)
    return removed
