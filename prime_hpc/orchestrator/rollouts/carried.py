"""Groups that were complete when an attempt was stopped, for the next one, which need not sample them again.

An attempt that is told to stop (its time is over, another role has died) writes them into one file: those that no batch
holds yet, those of batches of which no version came, and those that it had from the attempt before and has not opened
so far. The next attempt opens its prompts as ever, and where one of
them is here takes the rollouts in place of dispatching it.

That is exact only where both attempts are one history. The file is void where the state from which the next attempt
goes on is none that its writer had; where what is asked of engines and environments has changed; and for groups with
tokens of versions that the next attempt makes anew. An attempt between the two that ended before it had read the file
changes nothing: one that has read it has removed it. Groups in flight are never kept: of their
episodes the short ones have ended, and to draw the long ones again would make replies shorter.
"""

import hashlib
import io
import json
import struct
import zipfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.envs.samples import ARRAYS, EpisodeResult, EpisodeState, Sample
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.store.batch.images import ImageTable, images_of
from prime_hpc.store.batch.rank_batch import OF_TEACHER
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths

FORMAT = 1
MOST_BYTES = 1 << 30
"""Of the file: what a process that was told to stop can write in the seconds that it has."""
MOST_STATES = 1024
"""The newest batches whose states are known again: an attempt that goes on further back samples the groups again."""
_GAPS = "teacher_gaps"
"""The teacher is asked for them again, as for what a batch keeps of it."""
_ROUTED = "routed"
"""An array of a shape and a type of its own, where engines record experts."""
_TABLE = ("image_bytes", "image_offsets")
"""All images, each once."""
_META = "meta"
_DAMAGE = (LookupError, TypeError, AttributeError, OSError, EOFError, RuntimeError, struct.error, zipfile.BadZipFile)
"""A byte that is wrong may be of the archive itself."""


@dataclass(frozen=True)
class CarriedGroup:
    """A prompt and the ends of all its episodes."""

    prompt: Prompt
    results: list[EpisodeResult]
    attempt: int = 0
    """As `Group.attempt`: how often its prompt had been sent back before."""

    @property
    def newest_version(self) -> int:
        """The newest version that sampled one of its tokens; -1 without any."""
        versions = [int(s.versions.max(initial=-1)) for result in self.results for s in result.samples]
        return max(versions, default=-1)

    @property
    def num_bytes(self) -> int:
        """Of the arrays of all its samples, in a file."""
        samples = [sample for result in self.results for sample in result.samples]
        images = {image for sample in samples for image in sample.image_data}
        arrays = (getattr(sample, name) for sample in samples for name in (*ARRAYS, _ROUTED))
        return sum(map(len, images)) + sum(array.nbytes for array in arrays if array is not None)


def encode_groups(groups: Sequence[CarriedGroup], meta: Mapping[str, Any]) -> bytes:
    """Make a file's content: numpy's npz, without pickles. `meta` is plain JSON."""
    samples = [sample for group in groups for result in group.results for sample in result.samples]
    arrays: dict[str, Any] = {
        name: _joined(samples, name) for name in ARRAYS if any(getattr(s, name) is not None for s in samples)
    }
    table = ImageTable()
    rows = [
        {
            "prompt": asdict(group.prompt),
            "results": [_row(result, table) for result in group.results],
            "attempt": group.attempt,
        }
        for group in groups
    ]
    if table.images():
        arrays |= dict(zip(_TABLE, table.arrays(), strict=True))
    text = json.dumps({**meta, "format": FORMAT, "groups": rows})
    buffer = io.BytesIO()
    arrays[_META] = np.frombuffer(text.encode(), np.uint8)
    like = next((sample.routed for sample in samples if sample.routed is not None), None)
    if like is not None:  # where a sample has none, as in a batch: the type's largest number
        nobody = np.full((1, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
        arrays[_ROUTED] = np.concatenate(
            [nobody.repeat(s.num_tokens, 0) if s.routed is None else s.routed for s in samples]
        )
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def decode_groups(content: bytes) -> tuple[list[CarriedGroup], dict[str, Any]]:
    """Read what `encode_groups` made: the groups, and its `meta`.
    Raises ValueError: it is none, or damaged (the sums of its parts are checked)."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            meta = json.loads(found[_META].tobytes())
            if meta.get("format") != FORMAT:
                raise ValueError(f"format {meta.get('format')}, this version reads {FORMAT}")
            arrays = {name: found[name] for name in (*ARRAYS, _ROUTED) if name in found}
            images = images_of(*(found[name] for name in _TABLE)) if _TABLE[0] in found else []
        rows, groups, offset = meta.pop("groups"), [], 0
        for row in rows:
            results = []
            for one in row["results"]:
                samples = []
                for sample in one.pop("samples"):
                    end = offset + sample.pop("length")
                    parts = {name: values[offset:end].copy() for name, values in arrays.items()}
                    shown = sample.get("image_data", ())  # an older version's have none
                    sample["image_data"] = tuple(images[number - 1] for number in shown)
                    if not sample["image_data"]:
                        parts.pop("images", None)
                    samples.append(Sample(**sample, **parts))
                    offset = end
                state = EpisodeState(one.pop("state"))
                results.append(EpisodeResult(**one, state=state, samples=samples))
            groups.append(CarriedGroup(Prompt(**row["prompt"]), results, row.get("attempt", 0)))
        if any(len(values) != offset for values in arrays.values()):
            raise ValueError("its arrays are of another length than its samples")
    except _DAMAGE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return groups, meta


class GroupCarrier:
    """Remembers what a stop now would lose, writes it down, and hands out what the attempt before wrote down."""

    def __init__(
        self, paths: RunPaths, exp: Experiment, incarnation: int, start_step: int, state: Mapping[str, Any] | None
    ) -> None:
        """Read what there is for this attempt; what cannot be used is said and sampled again.

        Args:
            incarnation: of the attempt; 0: there are none, nothing is read or written.
            start_step: of the batch from which it goes on.
            state: that was stored with this batch.
        """
        self._path, self._incarnation = paths.carried_groups, incarnation
        self._config = _config_digest(exp)
        self._states = {start_step: state_digest(state)} if state is not None else {}
        self.batches: deque[tuple[int, list[Group]]] = deque()
        """Of which no version is served yet, by step."""
        self._carried: dict[int, CarriedGroup] = {}
        if incarnation > 0:
            self._carried = {group.prompt.position: group for group in self._load(start_step)}

    @property
    def num_left(self) -> int:
        """Groups whose prompts were not opened so far."""
        return len(self._carried)

    def begin_attempt(self, incarnation: int) -> None:
        """Write for the attempt that follows another one than the first."""
        self._incarnation = incarnation

    def take(self, group: Group) -> list[EpisodeResult]:
        """Return the ends of all the group's episodes, if the run's attempt before left them; else nothing. The group
        is of the same try then: traces name it with each of its rollouts."""
        found = self._carried.pop(group.prompt.position, None)
        if found is None or found.prompt != group.prompt or len(found.results) != group.num_rollouts:
            return []
        group.attempt = found.attempt
        return found.results

    def batch(self, step: int, groups: list[Group], state: Mapping[str, Any], served: int) -> None:
        """Note a batch and the state after it; of those up to version `served` nothing can be lost any more."""
        self._states[step] = state_digest(state)
        while len(self._states) > MOST_STATES:
            del self._states[min(self._states)]
        self.batches.append((step, groups))
        while self.batches and self.batches[0][0] <= served:
            self.batches.popleft()

    def save(self, complete: Iterable[Group]) -> None:
        """Write down `complete` groups, those of the batches that may be lost and those that were left by the attempt
        before; failing is no reason to fail."""
        if self._incarnation <= 0:
            return
        kept, size = [], 0
        ended = [*(group for _, groups in self.batches for group in groups), *complete]
        made = [CarriedGroup(g.prompt, [episode.result for episode in g.ended], g.attempt) for g in ended]
        for carried in [*made, *self._carried.values()]:
            size += carried.num_bytes
            if size > MOST_BYTES:
                break
            kept.append(carried)
        if not kept:
            return
        meta = {
            "incarnation": self._incarnation,
            "config": self._config,
            "states": {str(step): digest for step, digest in self._states.items()},
        }
        try:
            self._path.parent.mkdir(exist_ok=True)  # before the first batch it is not there
            files.write_atomic(self._path, encode_groups(kept, meta), sync=False)
        except (StoreError, OSError, TypeError, ValueError) as error:
            logger.warning(f"{len(kept)} complete groups are lost to the next attempt: {error}")
            return
        logger.info(f"{len(kept)} complete groups are kept for the next attempt: {self._path}")

    def _load(self, start_step: int) -> list[CarriedGroup]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            logger.warning(f"what the attempt before had complete is sampled again: {error}")
            return []
        try:
            files.remove_file(self._path)
            groups, meta = decode_groups(content)
        except (StoreError, OSError, ValueError) as error:
            logger.warning(f"{self._path} cannot be used, its groups are sampled again: {error}")
            return []
        reason = self._why_not(meta, start_step)
        if reason:
            logger.info(f"{len(groups)} groups of an earlier attempt are sampled again: {reason}")
            return []
        exact = [group for group in groups if group.newest_version <= start_step]
        if exact:
            logger.info(f"{len(exact)} groups of the attempt before need not be sampled again")
        return exact

    def _why_not(self, meta: Mapping[str, Any], start_step: int) -> str:
        if meta["incarnation"] >= self._incarnation:
            return f"they are of incarnation {meta['incarnation']}, this is {self._incarnation}"
        if meta["config"] != self._config:
            return "what is asked of engines or environments has changed"
        if start_step and meta["states"].get(str(start_step)) != self._states.get(start_step):
            return f"that attempt knew no step {start_step} as this one has it"
        return ""


def state_digest(state: Mapping[str, Any]) -> str:
    """Sum of what tells one history of a run from another in the orchestrator's state after a batch."""
    told = {key: state.get(key) for key in ("step", "prompts", "used", "totals")}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _config_digest(exp: Experiment) -> str:
    """Sum of all that says how rollouts are sampled and scored."""
    told = exp.model_dump(mode="json", include={"kind", "seed", "seq_len", "model", "orchestrator"})
    if exp.trainer.router_replay:
        told["router_replay"] = True
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _joined(samples: Sequence[Sample], name: str) -> np.ndarray:
    """Join an array of all samples; 0 stands where a sample has none."""
    kind, found = ARRAYS[name], [(getattr(sample, name), sample.num_tokens) for sample in samples]
    parts = [np.zeros(length, kind) if array is None else array for array, length in found]
    return np.concatenate(parts).astype(kind, copy=False) if parts else np.zeros(0, kind)


def _row(result: EpisodeResult, table: ImageTable) -> dict[str, Any]:
    """Plain JSON of a result; its samples without their arrays, their images as numbers of the table's."""
    row = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "samples"}
    names = [field.name for field in fields(Sample) if field.name not in (*ARRAYS, *OF_TEACHER, _GAPS, _ROUTED)]
    samples = [{name: getattr(s, name) for name in names} | {"length": s.num_tokens} for s in result.samples]
    for sample in samples:
        sample["image_data"] = [table.number(image) for image in sample["image_data"]]
    return row | {"state": result.state.value, "samples": samples}
