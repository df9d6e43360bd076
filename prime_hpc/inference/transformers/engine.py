"""The continuous batch: one thread that computes, sequences that join and leave between its steps.

A step admits waiting sequences to free rows, computes a piece of the prompts that are not in the cache yet, and then
one token of every sequence. The weights change between two steps, never within one: each token is of one version, and
after a change the keys and values of all sequences are computed again (unless `keep_kv_cache`), so that its
log-probability is that of one version too.

transformers has a continuous batch of its own (`ContinuousBatchingManager`). It is not used: it has one choice of
greedy or sampled for all requests, no seeds, no stop strings, no log-probabilities of prompts, no way to compute the
cache again after an update, and takes most of a machine's memory for its pages unless told how many.
"""

import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from prime_hpc.client.inference import NO_LOGPROB
from prime_hpc.inference.transformers.model import BatchModel
from prime_hpc.inference.transformers.sampling import Drawn, Sampler, candidates
from prime_hpc.inference.transformers.sequences import Running

PREFILL_TOKENS = 2048
"""Tokens of prompts in one forward pass, padding included."""


LOGITS = 1 << 26
"""Values of logits at once where a whole prompt's are asked for."""


class Engine:
    """Sequences in rows. All methods but `step` and those that it calls may be called from any thread."""

    def __init__(self, model: BatchModel, *, seed: int, keep_kv_cache: bool = False) -> None:
        """Make the engine; `start` runs it in a thread of its own.

        Args:
            model: with its cache; belongs to the engine's thread from `start` on.
            seed: of requests that state none.
            keep_kv_cache: sequences keep their keys and values at an update of the weights.
        """
        self.model = model
        self.sampler = Sampler(seed, model.device)
        self.version = 0
        self.num_sampled = self.num_prefilled = 0
        """Tokens since the start."""
        self.failure: str | None = None
        self._keep = keep_kv_cache
        self._rows: list[Running] = []
        self._waiting: deque[Running] = deque()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ended = False

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Sequences without."""
        return len(self._waiting)

    def start(self) -> None:
        """Compute from now on."""
        self._thread.start()

    def submit(self, sequence: Running) -> None:
        """Let a sequence join; `on_done` is called when it ends."""
        self._orders.put(lambda: self._join(sequence))

    def abort(self, sequence: Running) -> None:
        """End a sequence that nobody waits for any more, with what it has."""
        self._orders.put(lambda: self._leave(sequence))

    def between_steps(self, action: Callable[[], Any]) -> "Future[Any]":
        """Run something while no forward pass is under way; its result or exception."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                if self._ended:
                    raise RuntimeError(self.failure or "the server is ending")
                future.set_result(action())
            except BaseException as error:  # noqa: BLE001 - whoever asked decides
                future.set_exception(error)

        self._orders.put(run)
        return future

    def forget_cache(self) -> None:
        """After new weights: keys and values are computed again. Between steps only."""
        if not self._keep:
            for sequence in self._rows:
                sequence.num_cached = 0

    def fail(self, reason: str) -> None:
        """Compute no further token: the weights are undefined. `failure` says why, and the server ends."""
        self.failure = self.failure or reason
        self._ended = True
        self._orders.put(None)

    def stop(self, timeout_s: float) -> None:
        """End all sequences with `abort` and the thread."""
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._ended:
                self._take_orders()
                if not self._ended and (self._rows or self._waiting):
                    self.step()
        except BaseException as error:  # noqa: BLE001 - said to everyone who waits, and to the server, which ends
            traceback.print_exc()
            self.failure = f"{type(error).__name__}: {error}"
        self._ended = True
        while not self._orders.empty():  # those that came too late
            order = self._orders.get()
            if order is not None:
                order()
        for sequence in [*self._rows, *self._waiting]:
            sequence.error = self.failure
            self._finish(sequence, "abort")
        self._rows.clear()
        self._waiting.clear()

    def _take_orders(self) -> None:
        """Do what was asked for; waits while there is nothing to compute."""
        idle = not (self._rows or self._waiting)
        while True:
            try:
                order = self._orders.get(block=idle)
            except queue.Empty:
                return
            if order is None:
                self._ended = True
                return
            order()
            idle = False

    def _join(self, sequence: Running) -> None:
        if sequence.finish_reason is None:
            self._waiting.append(sequence)

    def _leave(self, sequence: Running) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._rows:
            self._free(self._rows.index(sequence))
        else:
            return
        self._finish(sequence, "abort")

    def _finish(self, sequence: Running, reason: Any) -> None:
        sequence.finish_reason = sequence.finish_reason or reason
        sequence.on_done(sequence)

    def _free(self, row: int) -> None:
        """Give a row back: the last one moves into it."""
        last = self._rows.pop()
        if row < len(self._rows):
            self.model.cache.move(len(self._rows), row, last.num_cached)
            self._rows[row] = last

    @torch.inference_mode()
    def step(self) -> None:
        """Compute a piece of what is new, then one token of every sequence."""
        while self._waiting and len(self._rows) < self.model.num_rows:
            self._rows.append(self._waiting.popleft())
        for i, sequence in enumerate(self._rows):
            if sequence.num_left > 1:
                self._prefill(i)
                break
        if self._rows:
            self._forward(0, len(self._rows), 1)

    def _prefill(self, first: int) -> None:
        """Compute further tokens of the row `first`, and of those behind it that are as far and have more to come."""
        start, rows, longest = self._rows[first].num_cached, 0, 0
        if self._rows[first].prompt_scores is not None:  # all its logits are asked for: alone, and in smaller pieces
            most = max(1, LOGITS // self.model.vocab_size)
            self._forward(first, 1, min(self._rows[first].num_left, most, PREFILL_TOKENS))
            return
        for sequence in self._rows[first:]:
            if sequence.prompt_scores is not None:
                break
            most = max(longest, sequence.num_left)
            if sequence.num_cached != start or sequence.num_left < 2 or (rows and (rows + 1) * most > PREFILL_TOKENS):
                break
            rows, longest = rows + 1, most
        self._forward(first, rows, min(longest, max(1, PREFILL_TOKENS // rows)))

    def _forward(self, first: int, num_rows: int, width: int) -> None:
        """Compute the next `width` tokens of some rows, as far as they have so many; draw where all are computed."""
        rows = self._rows[first : first + num_rows]
        starts = [sequence.num_cached for sequence in rows]
        counts = [min(width, sequence.num_left) for sequence in rows]
        ids = [s.tokens(start, n) for s, start, n in zip(rows, starts, counts, strict=True)]
        picks: list[tuple[int, int]] = []
        drawing: list[int] = []
        scoring: dict[int, int] = {}
        for i, sequence in enumerate(rows):
            if counts[i] == sequence.num_left:
                drawing.append(i)
                picks.append((i, counts[i] - 1))
        for i, sequence in enumerate(rows):
            if sequence.prompt_scores is not None and len(sequence.prompt_scores) < len(sequence.prompt):
                scoring[i] = len(picks)
                picks += [(i, column) for column in range(counts[i])]
        logits = self.model.forward(first, ids, starts, width, picks)
        if self.model.chosen is not None:
            for sequence, start, count, chosen in zip(rows, starts, counts, self.model.chosen, strict=True):
                sequence.keep_experts(start, chosen[:count])
        for sequence, count in zip(rows, counts, strict=True):
            sequence.num_cached += count
        self.num_prefilled += sum(counts) - len(drawing)
        for i, place in scoring.items():
            _score(rows[i], starts[i], logits[place : place + counts[i]])
        if drawing:
            self._draw([rows[i] for i in drawing], logits[: len(drawing)].clone() if scoring else logits)

    def _draw(self, rows: Sequence[Running], logits: torch.Tensor) -> None:
        drawn = self.sampler.draw(logits, [s.params for s in rows], [s.generator for s in rows])
        self.num_sampled += len(rows)
        for sequence, token in zip(rows, drawn, strict=True):
            sequence.append(token, self.version, self.model.eos)
        for row in range(len(self._rows) - 1, -1, -1):
            sequence = self._rows[row]
            if sequence.finish_reason is not None:
                self._free(row)
                self._finish(sequence, sequence.finish_reason)


def _score(sequence: Running, start: int, logits: torch.Tensor) -> None:
    """Add the log-probabilities, at temperature 1, of the prompt's tokens that logits from position `start` on speak
    of. After an update in between, those that are there stay."""
    scores = sequence.prompt_scores
    assert scores is not None
    have = len(scores)  # scores[i] is of prompt token i; logits of position p speak of token p + 1
    top = sequence.params.prompt_logprobs or 0
    rows = range(max(have - 1, start), min(start + len(logits), len(sequence.prompt) - 1))
    for p in rows:
        logprobs = logits[p - start].log_softmax(-1)
        token = sequence.prompt[p + 1]
        value = logprobs[token]
        found = {token: (float(value), int((logprobs > value).sum()) + 1)}
        for other, logprob, rank in candidates(logprobs[None], top)[0] if top else ():
            found.setdefault(other, (logprob, rank))
        scores.append(found)


def wire_row(drawn: Drawn, num_top: int | None) -> dict[str, Any]:
    """`logprobs.content` of one token, in the form of vLLM's generate route."""
    return {
        "token_id": drawn.token_id,
        "token": f"token_id:{drawn.token_id}",
        "logprob": finite(drawn.logprob),
        "rank": drawn.rank,
        "top_logprobs": [
            {"token_id": token, "logprob": finite(logprob), "rank": rank}
            for token, logprob, rank in drawn.top[: num_top or 0]
        ],
    }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return logprob if logprob >= NO_LOGPROB else NO_LOGPROB
