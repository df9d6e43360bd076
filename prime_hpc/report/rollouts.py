"""Rollouts to read: of steps spread over the run the best, the worst and some at random, from the stored batches, and
what the run wrote for people: texts (`metrics/samples.jsonl`), and tokens with both sides' probabilities
(`metrics/tokens.jsonl`).

Bounded whatever the run's size: so many steps are opened, so many characters go into the page; what is left out is
counted. Token by token, where a batch is stored: text, the engine's log-probability, the version that sampled it.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.observe.metrics import parse_row
from prime_hpc.report.series import Faults, number_of, raw_lines, short
from prime_hpc.report.token_text import TokenText
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batch
from prime_hpc.store.batches import PastBatch, list_batches
from prime_hpc.store.errors import StoreError
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.run_paths import RunPaths

_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')
"""How a row of `MetricsWriter` begins."""
STEPS_OPENED = 40
PER_STEP = 6
"""Rollouts of one step: two best, two worst, two at random."""
MOST_TOKENS = 1500
"""Of one rollout."""
MOST_CHARACTERS = 6000
"""Of one text."""
_READ_DEADLINE_S = 1.0
_LINES_READ = 2_000_000
"""Of `samples.jsonl`."""


@dataclass
class Budget:
    """Characters that may still go into the page."""

    left: int
    num_left_out: int = 0

    def take(self, size: int) -> bool:
        """Return whether it fits, and count it."""
        if size > self.left:
            self.num_left_out += 1
            return False
        self.left -= size
        return True


@dataclass
class Chosen:
    """Rollouts of a run for the page."""

    rollouts: list[dict[str, Any]] = field(default_factory=list)
    num_stored: int = 0
    """Sequences of the batches that were opened."""
    num_steps: int = 0
    left_out: int = 0
    problems: list[str] = field(default_factory=list)


def choose_rollouts(paths: RunPaths, env_names: Sequence[str], model: str, budget_bytes: int) -> Chosen:
    """Read them.

    Args:
        env_names: labels of the environments, in the config's order.
        model: `model.name`, where a tokenizer may lie.
        budget_bytes: about so many characters of JSON at most.
    """
    chosen = Chosen()
    texts = Budget(budget_bytes // 3)
    chosen.rollouts += _written(paths.metrics("samples"), texts)
    try:
        steps = list_batches(paths)
    except OSError as error:
        steps = []
        chosen.problems.append(f"{paths.rollouts}: {error.strerror}")
    chosen.num_steps = len(steps)
    tokens = paths.metrics("tokens")
    logged = _logged_steps(tokens)
    decoder = TokenText.of(paths, model) if steps or logged else None
    compared = Budget(budget_bytes // 3 + texts.left)
    chosen.rollouts += _compared(tokens, logged, env_names, decoder, compared)
    budget = Budget(budget_bytes - 2 * (budget_bytes // 3) + compared.left)
    for step in _spread(steps, STEPS_OPENED):
        try:
            chosen.rollouts += _of_step(paths, step, env_names, decoder, budget, chosen)
        except (StoreError, OSError, ValueError, KeyError) as error:
            if len(chosen.problems) < 5:
                chosen.problems.append(f"batch {step}: {error}")
    chosen.left_out = budget.num_left_out + texts.num_left_out + compared.num_left_out
    if decoder is not None and decoder.problem:
        chosen.problems.append(decoder.problem)
    return chosen


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most so many, evenly, with the first and the last; ordered so that a budget that ends early has seen
    all of the run."""
    if len(steps) <= most:
        picked = list(steps)
    else:
        picked = [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]
    ends = picked[:1] + picked[-1:] if len(picked) > 1 else picked
    middle = picked[1:-1]
    random.Random(0).shuffle(middle)
    return ends + middle


def _of_step(
    paths: RunPaths, step: int, env_names: Sequence[str], decoder: TokenText | None, budget: Budget, chosen: Chosen
) -> list[dict[str, Any]]:
    ranks = PastBatch(paths, step).read(_ranks)
    places = [(rank, s) for rank, batch in enumerate(ranks) for s in range(batch.num_sequences)]
    chosen.num_stored += len(places)
    if not places:
        return []
    rewards = np.concatenate([batch.rewards for batch in ranks])
    order = np.argsort(rewards, kind="stable")
    third = max(1, PER_STEP // 3)
    kinds = {int(i): "worst" for i in order[:third]} | {int(i): "best" for i in order[-third:][::-1]}
    others = [i for i in range(len(places)) if i not in kinds]
    kinds |= dict.fromkeys(random.Random(step).sample(others, min(len(others), third)), "random")
    found = []
    for index, kind in kinds.items():
        rank, sequence = places[index]
        row = _tokens_of(ranks[rank], sequence, decoder)
        env = int(ranks[rank].env_ids[sequence])
        row |= {
            "kind": kind,
            "step": step,
            "env": env_names[env] if 0 <= env < len(env_names) else str(env),
            "reward": short(float(rewards[index])),
            "sample": int(ranks[rank].sample_ids[sequence]),
            "group": int(ranks[rank].group_ids[sequence]),
        }
        if budget.take(12 * len(row["ids"]) + sum(map(len, row["text"])) + 200):
            found.append(row)
    return found


def _ranks(directory: Path) -> list[RankBatch]:
    num_ranks = int(read_manifest(directory, deadline_s=_READ_DEADLINE_S).meta["num_ranks"])
    return [read_rank_batch(directory, rank, deadline_s=_READ_DEADLINE_S) for rank in range(min(num_ranks, 64))]


def _tokens_of(batch: RankBatch, sequence: int, decoder: TokenText | None) -> dict[str, Any]:
    first, last = (int(offset) for offset in batch.seq_offsets[sequence : sequence + 2])
    cut = max(0, last - first - MOST_TOKENS)
    window = slice(first, last - cut)
    sampled = batch.versions[window] >= 0
    advantages = batch.advantages[window][batch.loss_mask[window]]
    logprobs = [v if s else None for v, s in zip(batch.logprobs[window].tolist(), sampled.tolist(), strict=True)]
    return {
        **_shown(batch.token_ids[window].tolist(), decoder),
        "logprobs": _thousandths(logprobs),
        "versions": _runs(batch.versions[window].tolist()),
        "trained": _runs(batch.loss_mask[window].astype(int).tolist()),
        "advantage": short(float(advantages[0])) if len(advantages) and (advantages == advantages[0]).all() else None,
        "temperature": short(float(batch.temperatures[sequence])),
        "num_tokens": last - first,
        "cut": cut,
    }


def _logged_steps(path: Path) -> list[int]:
    """Return the steps of which `tokens.jsonl` has rows."""
    return sorted({step for line in raw_lines(path, Faults()) if (step := _step_of(line)) is not None})


def _step_of(line: bytes) -> int | None:
    """Return the step of a row, of one of ours without reading all of it: the file may be larger than the memory."""
    if found := _STEP.match(line):
        return int(found[1])
    step = (parse_row(line) or {}).get("step")
    return step if isinstance(step, int) else None


def _compared(
    path: Path, logged: Sequence[int], env_names: Sequence[str], decoder: TokenText | None, budget: Budget
) -> list[dict[str, Any]]:
    """Return rows of `tokens.jsonl`, which is read again for those steps alone that are shown: it may have any length.
    Of a step that was done again, the later attempt's."""
    by_step: dict[int, dict[tuple[Any, Any], dict[str, Any]]] = {step: {} for step in _spread(logged, STEPS_OPENED)}
    for raw in raw_lines(path, Faults()):
        step = _step_of(raw)
        if step in by_step and (line := parse_row(raw)) is not None:
            by_step[step][line.get("sample"), line.get("num_tokens")] = line
    found = []
    for lines in by_step.values():
        for line in lines.values():
            try:
                row = _compared_row(line, env_names, decoder)
            except (KeyError, TypeError, ValueError):
                continue  # of another version
            if budget.take(20 * len(row["ids"] or row["text"]) + sum(map(len, row["text"])) + 200):
                found.append(row)
    return found


def _compared_row(line: dict[str, Any], env_names: Sequence[str], decoder: TokenText | None) -> dict[str, Any]:
    env, ids = int(line["env"]), [int(i) for i in line["ids"]]
    columns = {name: line[name] for name in ("logprobs", "trainer", "versions", "trained")}
    if any(len(values) != len(ids) for values in columns.values()):
        raise ValueError("columns of several lengths")
    return {
        **_shown(ids, decoder),
        "kind": "both sides",
        "step": line["step"],
        "env": env_names[env] if 0 <= env < len(env_names) else str(env),
        "reward": short(float(line["reward"])),
        "sample": line["sample"],
        "group": line["group"],
        "logprobs": _thousandths(columns["logprobs"]),
        "trainer": _thousandths(columns["trainer"]),
        "versions": _runs(columns["versions"]),
        "trained": _runs(columns["trained"]),
        "advantage": short(float(line["advantage"])),
        "temperature": short(float(line["temperature"])),
        "num_tokens": int(line["num_tokens"]),
        "cut": int(line["num_tokens"]) - len(ids),
    }


def _shown(ids: list[int], decoder: TokenText | None) -> dict[str, Any]:
    """Return the pieces of text, or the ids where nothing decodes them."""
    return {
        "ids": [] if decoder is not None and not decoder.problem else ids,
        "text": decoder.pieces(ids) if decoder is not None else [],
    }


def _thousandths(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else short(round(value, 3)) for value in values]


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Return equal neighbours as [value, count]."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


def _written(path: Path, budget: Budget) -> list[dict[str, Any]]:
    """Rows of `samples.jsonl`: a reservoir of them over all the file, so that any length is read in little memory."""
    rng, size = random.Random(0), 300
    kept: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(islice(raw_lines(path, Faults()), _LINES_READ)):
        place = number if len(kept) < size else rng.randrange(number + 1)
        if place >= size and len(kept) == size:
            continue
        row = parse_row(line)
        if row is None or not isinstance(row.get("completion"), str):
            continue
        if len(kept) < size:
            kept.append((number, _text_row(row)))
        else:
            kept[place] = (number, _text_row(row))
    kept.sort(key=lambda pair: pair[0])
    order = list(range(len(kept)))
    rng.shuffle(order)
    fits = {i for i in order if budget.take(len(kept[i][1]["prompt"]) + len(kept[i][1]["completion"]) + 200)}
    return [row for i, (_, row) in enumerate(kept) if i in fits]


def _text_row(row: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = str(row.get("prompt") or ""), row["completion"]
    reward, advantage = number_of(row.get("reward")), number_of(row.get("advantage"))
    versions = row.get("versions")
    return {
        "kind": "held-out" if row.get("kind") == "eval" else "sample",
        "step": row.get("step") if isinstance(row.get("step"), int) else 0,
        "env": str(row.get("env") or ""),
        "task": row.get("task") if isinstance(row.get("task"), int | str) else None,
        "reward": None if reward is None or reward != reward else short(reward),
        "advantage": None if advantage is None or advantage != advantage else short(advantage),
        "range": versions if isinstance(versions, list) else None,
        "truncated": bool(row.get("truncated")),
        "prompt": _cut(prompt),
        "completion": _cut(completion),
    }


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
