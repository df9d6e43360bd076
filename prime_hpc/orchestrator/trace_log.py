"""Every rollout of a run as a line of JSON, also those that fail, grow stale or are rejected, where that is asked for.

`<run>/traces/step_000012.jsonl` holds what ended while batch 12 was collected: a line `rollout` for each episode when
it ends, and a line `group` when what becomes of its group is known (`in_batch`, `stale`, `dropped`, `rejected`). A disk
that is full costs traces, never the run: the log says so once.
"""

import json
import time
from typing import IO, Any

from loguru import logger

from prime_hpc.config.sections.orchestrator import TracesConfig
from prime_hpc.observe.line_file import ends_torn
from prime_hpc.orchestrator.rollouts.episodes import Episode
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.store.run_paths import RunPaths, step_name

MIB = 1 << 20


class TraceLog:
    """The file of the current step, and the removal of the oldest ones."""

    def __init__(self, config: TracesConfig, paths: RunPaths, env_names: list[str], incarnation: int) -> None:
        """Args:
        incarnation: of this attempt, which stands in every line: an attempt that resumes collects its first step again.
        """
        self._config, self._folder = config, paths.root / "traces"
        self._env_names, self._incarnation = env_names, incarnation
        self._file: IO[bytes] | None = None
        self._step = 0
        self._room = 0
        self.num_left_out = 0
        """Lines that did not fit into their step's file, or could not be written."""
        self._broken = False

    def begin_attempt(self, incarnation: int) -> None:
        """Write another incarnation into the lines."""
        self._incarnation = incarnation

    def rollout(self, step: int, group: Group, index: int, episode: Episode) -> None:
        """One episode has ended, while batch `step` is collected."""
        result, prompt = episode.result, group.prompt
        row: dict[str, Any] = {
            "kind": "rollout",
            **self._place(group),
            "rollout": index,
            **({"greedy": True} if group.is_greedy(index) else {}),
            "state": result.state.value,
            "usable": episode.usable,
            "reason": episode.reason,
            "error_type": result.error_type,
            "stale": group.abandoned,
            "reward": result.reward,
            "metrics": result.metrics,
            "truncated": result.truncated,
            "task": prompt.task,
            "versions": [episode.min_version, episode.max_version],
            "num_sampled_tokens": episode.num_sampled_tokens,
            "seconds": round(result.duration_s, 3),
            "prompt": result.prompt_text,
            "completion": result.completion_text,
        }
        if self._config.tokens:
            row["samples"] = [
                {"token_ids": s.token_ids.tolist(), "loss_mask": s.loss_mask.astype(int).tolist()}
                for s in result.samples
            ]
        self._write(step, row)

    def group(self, step: int, group: Group, fate: str) -> None:
        """Note what became of a group: `in_batch`, `stale`, `dropped` or `rejected`."""
        self._write(step, {"kind": "group", **self._place(group), "fate": fate, "num_ended": group.num_ended})

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # what was still to be written
                self._say_broken(error)

    def _place(self, group: Group) -> dict[str, Any]:
        prompt = group.prompt
        return {"env": self._env_names[prompt.source], "position": prompt.position, "attempt": group.attempt}

    def _write(self, step: int, row: dict[str, Any]) -> None:
        try:
            if step != self._step or self._file is None:
                self._rotate(step)
            line = {"step": step, "incarnation": self._incarnation, "time": round(time.time(), 3), **row}
            data = json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"
            if len(data) > self._room:
                self.num_left_out += 1
                return
            assert self._file is not None
            self._file.write(data)
            self._room -= len(data)
        except OSError as error:
            self.num_left_out += 1
            self._say_broken(error)

    def _say_broken(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            logger.warning(f"traces cannot be written ({error}); the run goes on without them (said once)")

    def _rotate(self, step: int) -> None:
        """Open the step's file, remove those that are too old."""
        self.close()
        if step != self._step:
            if self.num_left_out:
                logger.info(f"traces of step {self._step}: {self.num_left_out} lines left out (max_mib_per_step)")
            self.num_left_out = 0
        self._step, self._room = step, int(self._config.max_mib_per_step * MIB)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{step_name(step)}.jsonl"
        self._file = path.open("ab", buffering=1 << 16)
        if ends_torn(path):  # an earlier attempt was killed while it wrote: its half line stays one
            self._file.write(b"\n")
        self._room -= path.stat().st_size
        if self._config.keep_steps is not None:
            # What an earlier attempt left of later steps is not newer: an attempt that resumes comes to them yet.
            begun = sorted(other for other in self._folder.glob("step_*.jsonl") if other <= path)
            for old in begun[: -self._config.keep_steps]:
                old.unlink(missing_ok=True)
