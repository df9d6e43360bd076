"""`tinker://` paths: where what an adapter saved lies on the shared file system, and what is known of it.

    <run>/tinker/<adapter>/index.json                      shape of the adapter, and its saves by name
    <run>/tinker/<adapter>/checkpoints/step_<n>/           tinker://<adapter>/weights/<name>: with the optimizer
    <run>/tinker/<adapter>/weights/step_<n>/               tinker://<adapter>/sampler_weights/<name>: for the engines

Saves are the store's own artifacts; the index is replaced in one rename after the artifact it names is whole. All of it
outlives the service: a later one reads what an earlier one wrote.
"""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.tinker_files import INDEX, adapters_root
from prime_hpc.trainer.tinker.batches import BadRequestError

SCHEME = "tinker://"
Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
UNNAMED = "unnamed-"
"""Begins the name of a save that only a sampler of one session knows."""
UNNAMED_LEFT_S = 86400
"""So long one stays whose session ended with the service: a client that lives may sample from it by its path."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"([0-9a-f]{8,32}):train:(\d{1,9})")


@dataclass(frozen=True)
class Shape:
    """The form in which an adapter was created."""

    base_model: str
    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Save:
    """One save of an adapter."""

    number: int
    """Of its artifact: `step_<number>`."""
    time: float
    """Seconds since the epoch."""
    steps: int
    """Optimizer steps done."""
    has_optimizer: bool = False
    """True if the optimizer had a state by then."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    expires: float | None = None
    """Seconds since the epoch from which on it may be deleted; None: never."""

    @property
    def has_expired(self) -> bool:
        """True if its time is over."""
        return self.expires is not None and self.expires <= time.time()


@dataclass(frozen=True)
class Index:
    """All that is known of an adapter's saves."""

    shape: Shape
    saves: dict[str, dict[str, Save]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    """Kind -> name -> save."""

    def with_save(self, kind: Kind, name: str, save: Save) -> "Index":
        """Return the index with one more save."""
        return Index(self.shape, {**self.saves, kind: {**self.saves[kind], name: save}})

    def without(self, kind: Kind, name: str) -> "Index":
        """Return the index without a save."""
        return Index(self.shape, {**self.saves, kind: {n: s for n, s in self.saves[kind].items() if n != name}})


@dataclass(frozen=True)
class Saved:
    """A save that a path names."""

    path: str
    model_id: str
    kind: Kind
    name: str
    shape: Shape
    save: Save
    run: RunPaths

    @property
    def folder(self) -> Path:
        """Its artifact."""
        number = self.save.number
        return self.run.checkpoint_step(number) if self.kind == "weights" else self.run.weights_step(number)


def tinker_path(model_id: str, kind: Kind, name: str) -> str:
    """Return the client's name of a save."""
    return f"{SCHEME}{model_id}/{kind}/{name}"


def check_name(name: str) -> str:
    """Return a save's name. Raises BadRequestError: it could be no file's name."""
    if not _NAME.fullmatch(name):
        raise BadRequestError(f"{name!r} names no save: letters, digits and . _ - alone, at most 128")
    return name


class Shelf:
    """The saves of all adapters below a run directory. Safe between threads; one process alone writes."""

    def __init__(self, run_dir: Path) -> None:
        self._root = adapters_root(run_dir)
        self._lock = threading.Lock()

    def of_model(self, model_id: str) -> RunPaths:
        """Return the directory of an adapter, which need not be there."""
        match = _MODEL.fullmatch(model_id)
        if match is None:
            raise BadRequestError(f"{model_id!r} is no id of an adapter of this service")
        return RunPaths(self._root / f"{match[1]}-{match[2]}")

    def has(self, adapter: str) -> bool:
        """Return whether a directory `<session>-<number>` is here: an adapter's that ever saved or trained."""
        return (self._root / adapter).is_dir()

    def models(self) -> Iterator[str]:
        """All adapters that ever saved or trained here."""
        for name in sorted(files.list_dir(self._root)):
            session, _, number = name.partition("-")
            if _MODEL.fullmatch(f"{session}:train:{number}"):
                yield f"{session}:train:{number}"

    def index(self, model_id: str) -> Index:
        """Return what is known of an adapter. Raises BadRequestError: there never was one of this id."""
        path = self.of_model(model_id).root / INDEX
        try:
            found = json.loads(path.read_bytes())
            saves: dict[str, dict[str, Save]] = {}
            for kind in KINDS:
                saves[kind] = {name: Save(**row) for name, row in found["saves"][kind].items()}
            return Index(Shape(**found["shape"]), saves)
        except FileNotFoundError:
            raise BadRequestError(f"there is no adapter {model_id} here") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadRequestError(f"what adapter {model_id} saved cannot be read: {path}: {error}") from error

    def write(self, model_id: str, index: Index) -> None:
        """Replace the index of an adapter."""
        root = self.of_model(model_id).root
        files.make_dir(root)
        write_atomic(root / INDEX, json.dumps(asdict(index), indent=1), sync_name=True)

    def find(self, path: str, kind: Kind | None = None) -> Saved:
        """Return the save that a path names. `kind`: that it must be of; None: any.
        Raises BadRequestError: there is none; says what there is."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise BadRequestError(f"{path} is no path of a save: {SCHEME}<adapter>/weights/<name>, or sampler_weights")
        model_id, found, name = parts[0], parts[1], parts[2]
        known: Kind = "weights" if found == "weights" else "sampler_weights"
        if kind is not None and known != kind:
            wanted = "save_state" if kind == "weights" else "save_weights_for_sampler"
            raise BadRequestError(f"{path} is of kind {known}; what is wanted here comes from {wanted}")
        index = self.index(model_id)
        if name not in index.saves[known]:
            there = ", ".join(index.saves[known]) or "nothing yet"
            raise BadRequestError(f"{path}: adapter {model_id} has saved {there} under {known}")
        if index.saves[known][name].has_expired:
            raise BadRequestError(f"{path} has expired (ttl_seconds)")
        return Saved(path, model_id, known, name, index.shape, index.saves[known][name], self.of_model(model_id))

    def change(self, model_id: str, change: Callable[[Index], Index]) -> Index:
        """Replace the index of an adapter by what `change` makes of it; returns the one before.
        Raises BadRequestError: there never was an adapter of this id."""
        with self._lock:
            before = self.index(model_id)
            self.write(model_id, change(before))
            return before

    def delete(self, saved: Saved) -> None:
        """Delete a save: first its name, where that is still this save's, then its artifact."""

        def without(index: Index) -> Index:
            known = index.saves[saved.kind].get(saved.name)
            is_same = known is not None and known.number == saved.save.number
            return index.without(saved.kind, saved.name) if is_same else index

        self.change(saved.model_id, without)
        shutil.rmtree(saved.folder, ignore_errors=True)

    def set_expiry(self, saved: Saved, ttl_seconds: int | None) -> None:
        """Let a save expire so many seconds from now, or never."""
        save = replace(saved.save, expires=expiry(ttl_seconds))
        self.change(saved.model_id, lambda index: index.with_save(saved.kind, saved.name, save))

    def saved(self, model_id: str) -> list[Saved]:
        """Return all saves of an adapter, those too whose time is over.
        Raises BadRequestError: there never was an adapter of this id."""
        index, run = self.index(model_id), self.of_model(model_id)
        return [
            Saved(tinker_path(model_id, kind, name), model_id, kind, name, index.shape, save, run)
            for kind in KINDS
            for name, save in index.saves[kind].items()
        ]

    def end_unnamed(self) -> None:
        """Have the saves expire that were to go with their sessions: these ended with an earlier life of the service.
        Before there are sessions of this one; what cannot be read or written is left alone."""
        for model_id in self.models():
            try:
                for saved in self.saved(model_id):
                    if saved.name.startswith(UNNAMED) and saved.save.expires is None:
                        self.set_expiry(saved, UNNAMED_LEFT_S)
            except (BadRequestError, OSError) as error:
                logger.warning(f"saves of {model_id} whose session is over could not be given an end: {error}")

    def delete_expired(self) -> list[str]:
        """Delete the saves whose time is over; returns their paths. What cannot be read or deleted is left alone, and
        keeps nothing else from being deleted."""
        deleted = []
        for model_id in self.models():
            try:
                for saved in self.saved(model_id):
                    if saved.save.has_expired:
                        self.delete(saved)
                        deleted.append(saved.path)
            except BadRequestError:
                continue
            except OSError as error:
                logger.warning(f"saves of {model_id} whose time is over could not be deleted: {error}")
        return deleted


def expiry(ttl_seconds: int | None) -> float | None:
    """Return the time, in seconds since the epoch, that is so many seconds from now; None for None.
    Raises BadRequestError: no second at all."""
    if ttl_seconds is None:
        return None
    if ttl_seconds < 1:
        raise BadRequestError(f"ttl_seconds = {ttl_seconds}: must be at least 1, or None to keep it for good")
    return time.time() + ttl_seconds


def new_save(
    number: int,
    steps: int,
    *,
    has_optimizer: bool,
    user_metadata: dict[str, str] | None,
    ttl_seconds: int | None = None,
) -> Save:
    """Return a save of this moment."""
    return Save(number, time.time(), steps, has_optimizer, dict(user_metadata or {}), expiry(ttl_seconds))


def _as_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def as_checkpoint(saved: Saved) -> dict[str, Any]:
    """Return a save as the client lists checkpoints."""
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": "training" if saved.kind == "weights" else "sampler",
        "time": _as_time(saved.save.time),
        "tinker_path": saved.path,
        "user_metadata": saved.save.user_metadata,
        "expires_at": None if saved.save.expires is None else _as_time(saved.save.expires),
    }


def as_training_run(shelf: Shelf, model_id: str) -> dict[str, Any]:
    """Return an adapter as the client lists training runs.
    Raises BadRequestError: there never was an adapter of this id."""
    shape, saves = shelf.index(model_id).shape, newest_first(shelf.saved(model_id))
    touched = (shelf.of_model(model_id).root / INDEX).stat().st_mtime
    last = {kind: next((as_checkpoint(saved) for saved in saves if saved.kind == kind), None) for kind in KINDS}
    return {
        "training_run_id": model_id,
        "base_model": shape.base_model,
        "model_owner": "",
        "is_lora": True,
        "lora_rank": shape.rank,
        "last_request_time": _as_time(touched),
        "last_checkpoint": last["weights"],
        "last_sampler_checkpoint": last["sampler_weights"],
        "user_metadata": shape.user_metadata,
    }


def newest_first(saves: list[Saved]) -> list[Saved]:
    """Return the saves that have not expired, by time."""
    return sorted((saved for saved in saves if not saved.save.has_expired), key=lambda saved: -saved.save.time)
