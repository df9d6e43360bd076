"""Groups of rollouts from dispatch to batch: the staleness gate, completion, dropping, sending back. Pure.

Step n turns version n - 1 into version n, and batch n may hold no token sampled by a version older than
`version_floor(n, async_level)`. Two guards keep that true:
- the *gate* opens no more groups than the batches that the served version already allows, so that little becomes stale;
- every finished group is checked token by token against the floor of the batch it would join; a stale one gives its
  prompt back to the stream (`take_stale`), to be sampled again by the newer policy.
A complete group whose rollouts have no tokens (each was cut off by its deadline) counts as one without usable rollouts.
So does one whose greedy rollout, where it has one (`Group.has_greedy`), is not usable.
A complete group that the curriculum's `gate` rejects is consumed like one with too few usable rollouts: its position is
recorded as dropped, and the room that it leaves opens another prompt.

A batch takes the first complete groups. A prompt that was sent back once is waited for when the next batch would find
it stale again: long rollouts are late, never lost.

With `masks_stale` the bound is one of the trained tokens alone: older ones are masked when the batch is scored
(`batching.batch_builder.score_groups`). Only a group without any younger token is stale then; one in flight never is,
and another one may be opened in place of one that outlasts the batches for which it was opened.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_hpc.orchestrator.rollouts.episodes import Episode
from prime_hpc.orchestrator.rollouts.prompts import Prompt

UNLIMITED_ASYNC = 1 << 30
"""async_level of a bench, where no trainer ever makes a new version."""


def version_floor(step: int, async_level: int) -> int:
    """Oldest version that may have sampled a token of batch `step`."""
    return max(0, step - 1 - async_level)


def max_open_groups(next_batch: int, served_version: int, async_level: int, num_prompts: int, last_batch: int) -> int:
    """How many groups may be open (in flight or complete, in no batch yet) while version `served_version` is served.

    Groups for batch m may start once version m - 1 - async_level is served, so the newest batch that may be worked on
    is served_version + 1 + async_level. Zero while batch `next_batch` itself must wait for a version.
    """
    newest_allowed = min(served_version + 1 + async_level, last_batch)
    return max(0, newest_allowed - next_batch + 1) * num_prompts


@dataclass(eq=False)
class Group:
    """The rollouts of one prompt. `slots[i]` is None until episode i has ended."""

    prompt: Prompt
    start_version: int
    attempt: int
    slots: list[Episode | None]
    lane: Any = None
    """The dispatcher's handle on its episodes."""
    has_greedy: bool = False
    """There is one more rollout, sampled greedily, which never trains: the episode after those of `slots`."""
    greedy: Episode | None = None
    """This one, once it has ended."""
    num_ended: int = 0
    abandoned: bool = False
    """Sent back while episodes were still running: what they return is ignored."""

    @property
    def num_rollouts(self) -> int:
        """All of the prompt's, the greedy one included."""
        return len(self.slots) + self.has_greedy

    def is_greedy(self, index: int) -> bool:
        """Return whether an episode's number is that of the greedy rollout."""
        return index == len(self.slots)

    @property
    def ended(self) -> list[Episode]:
        """All that have ended, in episode order."""
        return [slot for slot in (*self.slots, self.greedy) if slot is not None]

    @property
    def usable(self) -> list[Episode]:
        """The ended rollouts that may train, in episode order."""
        return [slot for slot in self.slots if slot is not None and slot.usable]

    @property
    def has_tokens(self) -> bool:
        """True if any usable rollout has tokens: one that its deadline cut off may count without."""
        return any(episode.result.samples for episode in self.usable)

    def min_version(self) -> int | None:
        """Oldest version among the usable rollouts' tokens so far."""
        versions = [r.min_version for r in self.usable if r.min_version is not None]
        return min(versions, default=None)

    def max_version(self) -> int | None:
        """Newest version among them."""
        versions = [r.max_version for r in self.usable if r.max_version is not None]
        return max(versions, default=None)


@dataclass
class GroupCounts:
    """Counts of groups since the last `drain`."""

    opened: int = 0
    completed: int = 0
    dropped: int = 0
    rejected: int = 0
    stale: int = 0


def admit_all(group: Group) -> str:
    """Admit every group: the gate of a run without admission gates."""
    return ""


@dataclass
class GroupBook:
    """Every open group, in exactly one of: in flight, complete (waiting for a batch), gone."""

    num_prompts: int
    async_level: int
    last_batch: int
    sizes: Sequence[int]
    """Rollouts of a group, of each source."""
    minima: Sequence[int]
    """Of these, those that must be usable, of each source."""
    greedy: Collection[int] = ()
    """Sources whose groups have a greedy rollout, too."""
    next_batch: int = 1
    ahead: int | None = None
    """Of a bench: `async_level` of the run that it stands for, whose trainer makes each version at once."""
    masks_stale: bool = False
    """Tokens that are too old are masked: see the module."""
    gate: Callable[[Group], str] = admit_all
    """Names what rejects a complete group that is not stale; empty: it is admitted. Called once a completion."""
    in_flight: dict[int, Group] = field(default_factory=dict)
    complete: deque[Group] = field(default_factory=deque)
    dropped_positions: list[int] = field(default_factory=list)
    """Consumed without a batch: too few usable rollouts, or rejected."""
    counts: GroupCounts = field(default_factory=GroupCounts)
    _attempts: dict[int, int] = field(default_factory=dict)
    _stale: list[Group] = field(default_factory=list)
    _consumed: list[Group] = field(default_factory=list)

    @property
    def num_open(self) -> int:
        """Groups in flight or complete."""
        return len(self.in_flight) + len(self.complete)

    @property
    def floor(self) -> int:
        """Oldest version allowed in the next batch."""
        return version_floor(self.next_batch, self.async_level)

    def mask_floor(self, step: int) -> int:
        """Oldest version whose tokens batch `step` may train, where older ones are masked; else 0."""
        return version_floor(step, self.async_level) if self.masks_stale else 0

    def may_open(self, served_version: int) -> bool:
        """Return whether one more group may start now."""
        if self.next_batch > self.last_batch:
            return False
        served_version, level = self._gate(served_version)
        limit = max_open_groups(self.next_batch, served_version, level, self.num_prompts, self.last_batch)
        if limit and self.masks_stale:  # others stand in for those that are late, but for no more than are needed
            floor = self.floor
            late = sum(group.start_version < floor for group in self.in_flight.values())
            limit = min(limit + late, (self.last_batch - self.next_batch + 1) * self.num_prompts)
        return self.num_open < limit

    def _gate(self, served_version: int) -> tuple[int, int]:
        """Version and `async_level` by which groups may be opened."""
        return (served_version, self.async_level) if self.ahead is None else (self.next_batch - 1, self.ahead)

    def held_by(self, served_version: int) -> str:
        """Return what keeps one more group from starting (`seats.CAUSES`): `end`, no later batch needs it; `tail`, the
        batch that the trainer waits for is not complete; `gate`, the trainer has not made the next version yet; ""
        where nothing does."""
        if self.may_open(served_version):
            return ""
        served_version, level = self._gate(served_version)
        if served_version + 1 + level >= self.last_batch:
            return "end"
        return "tail" if self.next_batch <= served_version + 1 else "gate"

    def open(self, prompt: Prompt, served_version: int) -> Group:
        """Start a group. The caller dispatches an episode for each of its slots."""
        assert prompt.position not in self.in_flight, f"prompt {prompt.position} is already in flight"
        attempt = self._attempts.get(prompt.position, 0)
        slots: list[Episode | None] = [None] * self.sizes[prompt.source]
        group = Group(prompt, served_version, attempt, slots, has_greedy=prompt.source in self.greedy)
        self.in_flight[prompt.position] = group
        self.counts.opened += 1
        return group

    def add(self, group: Group, index: int, episode: Episode) -> None:
        """Episode `index` of the group ended. The last one completes, drops, rejects or sends back the group."""
        if group.abandoned:
            return
        is_greedy = group.is_greedy(index)
        before = group.greedy if is_greedy else group.slots[index]
        assert before is None, f"episode {index} of prompt {group.prompt.position} ended twice"
        if is_greedy:
            group.greedy = episode
        else:
            group.slots[index] = episode
        group.num_ended += 1
        if group.num_ended < group.num_rollouts:
            return
        del self.in_flight[group.prompt.position]
        lacks_greedy = group.greedy is not None and not group.greedy.usable
        if lacks_greedy or len(group.usable) < self.minima[group.prompt.source] or not group.has_tokens:
            self.counts.dropped += 1
            self._consume(group)
        elif self._is_stale(group):
            self._send_back(group)
        elif self.gate(group):
            self.counts.rejected += 1
            self._consume(group)
        else:
            self.counts.completed += 1
            self.complete.append(group)

    def take_stale(self) -> list[Group]:
        """Return groups that must be sampled again; the caller gives their prompts back and cancels episodes still
        running."""
        stale, self._stale = self._stale, []
        return stale

    def take_consumed(self) -> list[Group]:
        """Return groups that were dropped or rejected since the last call: nothing more is done for them."""
        consumed, self._consumed = self._consumed, []
        return consumed

    def batch_ready(self) -> bool:
        """Return whether `take_batch` has its groups and need not wait for one that was already sent back once."""
        return len(self.complete) >= self.num_prompts and not self._late_returners()

    def take_batch(self) -> list[Group]:
        """Return the next batch's groups; those that are now too old for the batch after it are marked stale."""
        assert self.batch_ready(), "take_batch before batch_ready"
        ordered = sorted(self.complete, key=self._urgency)
        groups, rest = ordered[: self.num_prompts], ordered[self.num_prompts :]
        for group in groups:
            self._attempts.pop(group.prompt.position, None)
        self.next_batch += 1
        self.complete = deque(g for g in rest if not self._is_stale(g))
        for group in rest:
            if self._is_stale(group):
                self._send_back(group)
        for group in [g for g in self.in_flight.values() if not self.masks_stale and self._is_stale(g)]:
            del self.in_flight[group.prompt.position]
            self._send_back(group)
        return groups

    def outstanding(self) -> list[Prompt]:
        """Prompts of all open groups: what a resume after the last taken batch must dispatch again."""
        groups = [*self.in_flight.values(), *self.complete, *self._stale]
        return [group.prompt for group in groups]

    def drain_dropped(self) -> list[int]:
        """Positions dropped or rejected since the last call: terminal, recorded with the next batch's state."""
        dropped, self.dropped_positions = self.dropped_positions, []
        return dropped

    def drain_counts(self) -> GroupCounts:
        """Return the counts since the last call."""
        counts, self.counts = self.counts, GroupCounts()
        return counts

    def _late_returners(self) -> bool:
        """Return a prompt that came back once is still in flight, and the batch after the next would find it stale
        again. None is where old tokens are masked."""
        if self.masks_stale:
            return False
        floor_after = version_floor(self.next_batch + 1, self.async_level)
        return any(g.attempt > 0 and g.start_version < floor_after for g in self.in_flight.values())

    def _urgency(self, group: Group) -> tuple[int, int, int, bool]:
        """Sort groups by what a batch takes first: those that came back; where tokens are masked, those whose newest is
        the oldest, the late ones first; those that the next batch would find too old. Else in order of completion."""
        newest, oldest = (group.max_version(), group.min_version()) if self.masks_stale else (None, None)
        return -group.attempt, newest or 0, oldest or 0, not self._ages(group, self.next_batch + 1)

    def _ages(self, group: Group, step: int) -> bool:
        """Return whether batch `step` may not train all of the group's tokens."""
        oldest = group.min_version()
        return oldest is not None and oldest < version_floor(step, self.async_level)

    def _is_stale(self, group: Group) -> bool:
        """Return whether the next batch may not have the group."""
        if not self.masks_stale:
            return self._ages(group, self.next_batch)
        newest = group.max_version()
        return newest is not None and newest < self.floor

    def _consume(self, group: Group) -> None:
        self.dropped_positions.append(group.prompt.position)
        self._attempts.pop(group.prompt.position, None)
        self._consumed.append(group)

    def _send_back(self, group: Group) -> None:
        position = group.prompt.position
        self._attempts[position] = group.attempt + 1
        group.abandoned = True
        self.counts.stale += 1
        self._stale.append(group)
