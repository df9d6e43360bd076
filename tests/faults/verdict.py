"""What must be true of a run directory after a run that was interrupted and brought back. Called by `sweep`."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.observe.metrics import read_metrics
from prime_hpc.orchestrator.batching.batch_builder import EPISODE_BITS
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.batch.images import image_runs
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batch
from prime_hpc.store.batches import read_state
from prime_hpc.store.errors import StoreError
from prime_hpc.store.manifest import MANIFEST, read_manifest, verify_artifact
from prime_hpc.store.run_paths import RunPaths, list_steps
from prime_hpc.weight_transport.delta_image import restore
from tests.faults.oracle import WORLD_SIZE, Oracle
from tests.faults.world import ASYNC_LEVEL, GROUP, PROMPTS, STEPS

Rollouts = dict[bytes, "np.ndarray"]
"""Token ids, with what they show -> the engine's log-probability of each, NaN of those that do not train."""


@dataclass
class Verdict:
    """What is wrong with a run; everything empty: nothing."""

    skipped: list[int] = field(default_factory=list)
    """Positions of the prompt stream that no batch holds, and which nobody remembers as still to do."""
    duplicated: list[int] = field(default_factory=list)
    """Positions in more than one batch, or in one and still to do."""
    mismatches: list[str] = field(default_factory=list)
    """Where the final state is not that of the uninterrupted run on the same batches."""
    broken: list[str] = field(default_factory=list)
    """Artifacts that fail their manifest, temporary names that are left, retention that does not hold."""
    failed: list[str] = field(default_factory=list)
    """An attempt that did not end as it should."""

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return not any(vars(self).values())

    def words(self) -> list[str]:
        """All findings, one a line."""
        return [f"{kind}: {item}" for kind, items in vars(self).items() for item in items]


def rollouts_of(paths: RunPaths) -> dict[int, Rollouts]:
    """Prompt position -> the token sequences that were trained on for it, of all batches."""
    found: dict[int, Rollouts] = {}
    for step in list_steps(paths.rollouts):
        for rank in range(WORLD_SIZE):
            batch = read_rank_batch(paths.rollouts_step(step), rank)
            for index, group in enumerate(batch.group_ids.tolist()):
                tokens, logprobs = _sequence(batch, index)
                found.setdefault(group, {})[tokens] = logprobs
    return found


def most_masked(paths: RunPaths) -> float:
    """Return the largest share of a batch's sampled tokens that were masked because they were too old."""
    return max((row.get("tokens/stale", 0.0) for row in read_metrics(paths.metrics("orchestrator"))), default=0.0)


def _sequence(batch: RankBatch, index: int) -> tuple[bytes, np.ndarray]:
    span = slice(int(batch.seq_offsets[index]), int(batch.seq_offsets[index + 1]))
    shown = [] if batch.images is None else image_runs(batch.images[span]).tolist()
    tokens = batch.token_ids[span].tobytes() + b"".join(batch.encoded_image(number) for _, _, number in shown)
    return tokens, np.where(batch.loss_mask[span], batch.logprobs[span], np.float32(np.nan))


def _is_same(known: Rollouts, tokens: bytes, logprobs: np.ndarray, masks: bool) -> bool:
    """Whether a prompt has this rollout. Where old tokens are masked (`masks`), chance says which of them train, and a
    rollout of which none did is in no batch: a prompt with fewer than it should have is not known whole."""
    if tokens not in known:
        return masks and len(known) < GROUP
    is_masked = np.isnan([known[tokens], logprobs])
    is_equal = (known[tokens] == logprobs) | is_masked.any(axis=0)
    return bool(is_equal.all()) and (masks or bool((is_masked[0] == is_masked[1]).all()))


def judge(
    run_dir: Path, reference: dict[int, Rollouts], oracle: Oracle, ckpt: dict[str, Any], *, masks: bool = False
) -> Verdict:
    """Check a finished run.

    Args:
        run_dir: its directory.
        reference: `rollouts_of` an uninterrupted run with the same server.
        oracle: knows the state that it should have.
        ckpt: its checkpoint section.
        masks: `orchestrator.stale: mask`.
    """
    paths, verdict = RunPaths(run_dir), Verdict()
    try:
        _judge_prompts(paths, verdict)
        _judge_rollouts(paths, reference, masks, verdict)
        _judge_artifacts(paths, verdict)
        if not verdict.broken:
            verdict.mismatches += oracle.differences(run_dir, STEPS)
    except (StoreError, OSError, ValueError) as error:
        verdict.broken.append(f"{type(error).__name__}: {error}")
    _judge_retention(paths, ckpt, verdict)
    _judge_leftovers(run_dir, verdict)
    _judge_attempts(paths, verdict)
    return verdict


def _judge_prompts(paths: RunPaths, verdict: Verdict) -> None:
    """Every position below the cursor is in exactly one batch, dropped once, or still to do."""
    seen: list[int] = []
    state: dict[str, Any] = {}
    for step in range(1, STEPS + 1):
        state = read_state(paths.rollouts_step(step))
        if len(state["used"]) != PROMPTS:
            verdict.failed.append(f"batch {step} holds {len(state['used'])} prompts")
        seen += [*state["used"], *state["dropped"]]
    seen += [position for position, *_ in state["prompts"]["pending"]]
    verdict.duplicated += sorted({position for position in seen if seen.count(position) > 1})
    verdict.skipped += sorted(set(range(state["prompts"]["cursor"])) - set(seen))
    beyond = [position for position in seen if position >= state["prompts"]["cursor"]]
    verdict.failed += [f"prompt {position} lies beyond the stream's cursor" for position in beyond]


def _judge_rollouts(paths: RunPaths, reference: dict[int, Rollouts], masks: bool, verdict: Verdict) -> None:
    """What a batch says that it used is what its ranks hold, once; each sequence is one of its prompt's, and none of
    the tokens that train is older than `async_level` allows."""
    for step in range(1, STEPS + 1):
        used = set(read_state(paths.rollouts_step(step))["used"])
        samples: list[int] = []
        for rank in range(WORLD_SIZE):
            batch = read_rank_batch(paths.rollouts_step(step), rank)
            samples += batch.sample_ids.tolist()
            for index, group in enumerate(batch.group_ids.tolist()):
                if group not in used or group != batch.sample_ids[index] >> EPISODE_BITS:
                    verdict.mismatches.append(f"batch {step} holds a rollout of prompt {group}, which it did not use")
                elif group in reference and not _is_same(reference[group], *_sequence(batch, index), masks):
                    verdict.mismatches.append(f"batch {step}: a rollout of prompt {group} is another prompt's")
            oldest = min(batch.versions[batch.loss_mask].tolist(), default=step)
            if oldest < step - 1 - ASYNC_LEVEL:
                verdict.mismatches.append(f"batch {step} trains on a token of version {oldest}")
        if len(samples) != len(set(samples)) or len(samples) > PROMPTS * GROUP:
            verdict.duplicated += sorted({s >> EPISODE_BITS for s in samples if samples.count(s) > 1})


def _judge_artifacts(paths: RunPaths, verdict: Verdict) -> None:
    for parent, digits in ((paths.rollouts, 6), (paths.weights, 6), (paths.checkpoints, 0)):
        for step in list_steps(parent, digits):
            name = f"step_{step:0{digits}d}"
            try:
                verify_artifact(parent / name, deep=True)
                if parent == paths.weights:
                    with tempfile.TemporaryDirectory(prefix="whole-") as folder:
                        restore(parent / name, Path(folder) / name)  # sums every version on the way
            except StoreError as error:
                verdict.broken.append(str(error))


def _judge_retention(paths: RunPaths, ckpt: dict[str, Any], verdict: Verdict) -> None:
    """What is kept is what the config says, and what that needs."""
    checkpoints, weights = list_steps(paths.checkpoints, 0), list_steps(paths.weights)
    keep = ckpt.get("keep_last")
    if STEPS not in checkpoints or (keep is not None and len(checkpoints) > keep):
        verdict.broken.append(f"checkpoints of steps {checkpoints} are kept, keep_last is {keep}")
    if STEPS not in weights or not set(checkpoints) <= set(weights):
        verdict.broken.append(f"weights {weights} do not hold all of the checkpoints' {checkpoints}")
    if list_steps(paths.rollouts) != list(range(1, STEPS + 1)):
        verdict.broken.append(f"batches {list_steps(paths.rollouts)} are there")


def _judge_leftovers(run_dir: Path, verdict: Verdict) -> None:
    """Temporary names anywhere but in the logs; in an artifact the manifest decides (`.metadata` is DCP's)."""
    names = [p for p in run_dir.rglob(".*") if "logs" not in p.relative_to(run_dir).parts]
    hidden = [p for p in names if not _is_named(p, run_dir)]
    outer = [p for p in hidden if not any(parent in hidden for parent in p.parents)]
    verdict.broken += [f"left behind: {path.relative_to(run_dir)}" for path in outer]


def _is_named(path: Path, run_dir: Path) -> bool:
    """Whether it is a file of a whole artifact."""
    for parent in path.relative_to(run_dir).parents:
        if (run_dir / parent / MANIFEST).exists() and not parent.name.startswith("."):
            return path.relative_to(run_dir / parent).as_posix() in read_manifest(run_dir / parent).files
    return False


def _judge_attempts(paths: RunPaths, verdict: Verdict) -> None:
    rows = read_attempts(paths.attempts)
    written = {row["attempt"] for row in rows}
    started = {int(path.parent.name.removeprefix("attempt_")) for path in paths.root.glob("logs/attempt_*/trainer")}
    verdict.failed += [f"attempt {number} started roles and is not written down" for number in started - written]
    if not rows or rows[-1]["outcome"] != "completed":
        verdict.failed.append(f"the last attempt is {rows[-1]['outcome'] if rows else 'not written down'}")
    verdict.failed += [f"attempt {row['attempt']} has no end" for row in rows if row["ended"] is None]
