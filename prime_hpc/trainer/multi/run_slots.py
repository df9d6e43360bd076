"""Rank 0's list of the runs below a parent: found, checked, given a slot, and what became of them.

    run_* directory --whole?--> [waiting] --slot free--> [training] --> done | stopped | failed | removed
                       |no                                                        |
                       '-- passed over until it is (said once)      slot freed, `state.json` says why

Everything that can be wrong with one directory is that child's failure, or a warning where it may not even be one; it
never ends the trainer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.config.run_files import STOP as STOP_FILE
from prime_hpc.store.checkpoint.failed_reads import FailedReads
from prime_hpc.store.child_runs import ChildState, Phase, list_children, read_state_strictly, write_state
from prime_hpc.store.errors import PROOFS, FencedError, InDoubt, NoRoom, StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.io.retry_reads import as_unreadable
from prime_hpc.store.io.room import has_room
from prime_hpc.store.run_paths import RunPaths, check_incarnation, current_incarnation
from prime_hpc.trainer.multi.admission import Admission, prepare, read_child

STOPPED = "the file STOP was found"
DELETED = "its directory was deleted or replaced"
OURS = frozenset({"weights", "checkpoints", "metrics", "failed", "leases", "doubts", "state.json", "saved.json"})
"""Files that a trainer writes into a run's directory."""
LOOK_S = 2.0
"""Between two looks at the parent's directory: one listing, and two small operations for each run that trains."""
ENDED_LOOK_S = 15.0
"""The same for runs that ended: there may be many of them, and all that can happen is that one is resumed."""
STATE_S = 2.0
"""Progress is written into `state.json` no more often."""
DELETION_S = 0.5
"""Longest look whether a run that failed is being deleted."""
UNREAD_S, MOST_UNREAD_S = 5.0, 60.0
"""Between the first two tries to begin a run of which something cannot be read; doubled with each, up to the most: the
others wait while it is tried."""
UNCHANGED_S = 5.0
"""A run.yaml that cannot be read counts as wrong when it has not changed for so long: it may be being written."""


@dataclass(frozen=True)
class Leave:
    """A run has to give its slot up."""

    name: str
    phase: Phase
    reason: str
    save: bool = False


@dataclass
class _Seen:
    """A directory that is not (yet) training."""

    since: float
    stamp: tuple[int, int] | None = None
    """Size and time of its run.yaml when it could not be read first."""
    said: str | None = None
    """The last warning."""
    next_look: float = 0.0


@dataclass
class _Unread:
    """A run that cannot begin because something of it cannot be read now, or has no room."""

    failed_reads: FailedReads
    since: float | None = None
    """Of what cannot be read; a doubt has a wait of its own."""
    pause: float = 0.0
    """Before the last try."""
    next_try: float = 0.0
    no_room: NoRoom | None = None
    """The last try's, which says how much all of it takes."""


class RunSlots:
    """Rank 0 only. Directories are looked at by `look`, slots are given by `admit` and freed by `ended`."""

    def __init__(
        self,
        parent: Experiment,
        parent_dir: Path,
        incarnation: int,
        announce: Callable[[str, ChildState], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`announce`: told of every change of a child's state."""
        self._parent, self._dir, self._incarnation = parent, parent_dir, incarnation
        self._announce, self._clock = announce, clock
        self._seen: dict[str, _Seen] = {}
        self._states: dict[str, ChildState] = {}
        self._lives: dict[str, int] = {}
        """Incarnation of each run that holds a slot: another one in its directory is another run."""
        self._stopping: set[str] = set()
        """Runs whose STOP was seen: the file stays until they have ended, for a trainer that is killed meanwhile."""
        self._lives_known: dict[str, int] = {}
        """Incarnation that each run had at least, by the last word on it."""
        self._unread: dict[str, _Unread] = {}
        self._slots: list[str | None] = [None] * parent.trainer.max_concurrent_runs
        self._next_look = 0.0
        self._blind_since: float | None = None
        self._has_yaml = False
        """Whether the parent's directory was seen with its own run.yaml: without, it is not all there."""

    @property
    def training(self) -> list[str]:
        """Runs that hold a slot."""
        return [name for name in self._slots if name is not None]

    @property
    def waiting(self) -> list[str]:
        """Whole runs without a slot, first come first."""
        rows = [(seen.since, name) for name, seen in self._seen.items() if self._phase(name) == "waiting"]
        return [name for _, name in sorted(rows)]

    @property
    def is_changing(self) -> bool:
        """True if a directory cannot be read as a run, and changed so lately that it may still be being written; or
        whether none can be seen at all."""
        return self._blind_since is not None or any(
            seen.stamp is not None and self._phase(name) is None for name, seen in self._seen.items()
        )

    def state(self, name: str) -> ChildState:
        """Return the last word on a run."""
        return self._states[name]

    def _phase(self, name: str) -> Phase | None:
        state = self._states.get(name)
        return state.phase if state is not None else None

    # ------------------------------------------------------------------------------------------------ looking

    def look(self, *, now: bool = False) -> list[Leave]:
        """Look at the directories where it is time to; returns the runs that have to leave.
        `now`: do not wait for the next time."""
        moment = self._clock()
        if not now and moment < self._next_look:
            return []
        self._next_look = moment + LOOK_S
        try:
            inside = files.list_dir(self._dir)
            if not inside or (self._has_yaml and RUN_YAML not in inside):
                raise Unreadable(self._dir, "it does not list its own run.yaml: is it mounted here?")
            names, self._has_yaml = list_children(self._dir), RUN_YAML in inside
        except (Unreadable, OSError) as error:
            self._blind_since = moment if self._blind_since is None else self._blind_since
            limit = self._parent.supervisor.read_timeout_s
            if not self.training and moment - self._blind_since > limit:
                raise Unreadable(self._dir, f"{error}; waited {limit:.0f} s (supervisor.read_timeout_s)") from error
            logger.warning(f"{self._dir} cannot be listed ({error}); the runs go on, new ones are not seen")
            return []
        self._blind_since = None
        for name in [n for n in self._seen if n not in names]:
            self._gone(name)
        found = []
        for name in names + [n for n in self.training if n not in names]:
            try:
                if name not in self._slots:
                    self._look_at(name, moment)
                elif (leave := self._trouble(name, name in names)) is not None:
                    found.append(leave)
            except OSError as error:
                logger.warning(f"{self._dir / name} cannot be looked at ({error}); it is looked at again")
        return found

    def _look_at(self, name: str, moment: float) -> None:
        """Look whether a directory without a slot is a run that wants one."""
        seen = self._seen.setdefault(name, _Seen(moment))
        path = self._dir / name
        if moment < seen.next_look:
            return
        if path.is_symlink() or not path.is_dir():
            self._say(seen, f"{path} is passed over: it is a file or a link, and a run needs a directory of its own")
            return
        inside = files.list_dir(path)
        if RUN_YAML not in inside and self._phase(name) in ("waiting", "failed"):
            self._gone(name)
            return
        if self._phase(name) == "waiting":
            if STOP_FILE in inside:
                self.ended(name, "stopped", STOPPED)
            return
        if RUN_YAML not in inside:
            self._say(seen, f"{path} is passed over as long as it holds no {RUN_YAML}: half-written, or no run")
            return
        before = read_state_strictly(path)
        own = self._states.get(name)
        if before is not None and before.has_ended:
            self._states[name], seen.next_look = before, moment + ENDED_LOOK_S
            return
        if before is not None and own is not None and before.parent_incarnation == self._incarnation:
            seen.next_look = moment + ENDED_LOOK_S
            self._set(name, own)  # it has ended, and there was no room for that word
            return
        try:
            experiment = read_child(self._parent, path)
        except ConfigError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno not in PROOFS:
                raise error.__cause__ from error
            self._refuse_when_unchanged(name, seen, path, str(error), moment)
            return
        self._lives_known[name] = before.incarnation if before is not None else 0
        was = f", goes on (it was {before.phase})" if before is not None else ""
        logger.info(f"found {path.name}: {experiment.max_steps} steps{was}")
        known = before or ChildState("waiting")
        self._set(name, replace(known, phase="waiting", reason="for a slot", slot=None, max_steps=experiment.max_steps))

    def _gone(self, name: str) -> None:
        """Forget a run without a slot that was deleted. A step in the midst of a deletion fails before all of it is
        gone: the last word on such a run is that it was removed, too."""
        if self._phase(name) in ("waiting", "failed"):
            self.ended(name, "removed", DELETED)
        for known in (self._seen, self._states, self._unread):
            known.pop(name, None)

    def _refuse_when_unchanged(self, name: str, seen: _Seen, path: Path, reason: str, moment: float) -> None:
        try:
            status = (path / RUN_YAML).stat()
        except OSError:
            return  # gone again
        stamp = (status.st_size, status.st_mtime_ns)
        if stamp != seen.stamp:
            seen.stamp, seen.since = stamp, moment
        elif moment - seen.since >= UNCHANGED_S:
            self.ended(name, "failed", reason)

    def _say(self, seen: _Seen, text: str) -> None:
        if seen.said != text:
            seen.said = text
            logger.warning(text)

    def _trouble(self, name: str, is_listed: bool) -> Leave | None:
        """Why a run that trains has to leave, as far as its directory tells."""
        path = self._dir / name
        inside = files.list_dir(path) if is_listed else []
        if RUN_YAML not in inside or current_incarnation(RunPaths(path)) != self._lives[name]:
            self._seen.pop(name, None)
            return Leave(name, "removed", DELETED)
        if STOP_FILE in inside and name not in self._stopping:
            self._stopping.add(name)
            return Leave(name, "stopped", STOPPED, save=True)
        return None

    # ------------------------------------------------------------------------------------------------ slots

    def admit(self) -> Admission | None:
        """Give a free slot to the run that has waited longest; None where there is neither. Runs that cannot begin
        have failed by then.

        Raises:
            FencedError: a newer attempt of this trainer has begun; it may give no slot any more.
            NoRoom, Unreadable: see `_put_off`.
        """
        for name in self.waiting:
            unread = self._unread.setdefault(name, _Unread(FailedReads(self._parent.supervisor.recheck_s)))
            if None not in self._slots:
                break
            if self._clock() < unread.next_try:
                continue
            if unread.no_room is not None and not has_room(self._dir / name, unread.no_room.needs):
                self._put_off(name, unread, unread.no_room)
                continue
            slot, known = self._slots.index(None), self._lives_known.get(name, 0)
            try:
                admission = prepare(
                    self._parent,
                    self._dir / name,
                    slot,
                    unread.failed_reads,
                    known,
                    parent_incarnation=self._incarnation,
                )
            except FencedError as error:
                check_incarnation(RunPaths(self._dir), self._incarnation)
                self._put_off(name, unread, Unreadable(self._dir / name, str(error)))  # an older trainer's last word
                continue
            except (ConfigError, StoreError, OSError) as error:
                told = error.__cause__ if isinstance(error, ConfigError) else error
                trouble = told if isinstance(told, NoRoom) else as_unreadable(told)
                if trouble is not None:
                    self._put_off(name, unread, trouble)
                else:
                    self.ended(name, "failed", str(error))
                continue
            if admission.is_done:
                self.ended(name, "done", "nothing was left to do")
                continue
            self._slots[slot], self._lives[name] = name, admission.incarnation
            self._lives_known[name] = admission.incarnation
            del self._seen[name]
            return admission
        return None

    def _put_off(self, name: str, unread: _Unread, trouble: NoRoom | Unreadable) -> None:
        """Let it wait, and others take their turn. Raises NoRoom, Unreadable: for so long that, with nothing else to
        train, this trainer's attempt is over; the next one goes on."""
        now, limit = self._clock(), self._parent.supervisor.read_timeout_s
        unread.no_room = trouble if isinstance(trouble, NoRoom) else None
        logger.warning(f"{name} waits: {trouble}")
        if isinstance(trouble, InDoubt):
            unread.next_try = now + trouble.left_s
        else:
            unread.since = now if unread.since is None else unread.since
            unread.pause = min(2 * unread.pause, MOST_UNREAD_S) or UNREAD_S
            unread.next_try = now + unread.pause
        if unread.since is not None and now - unread.since > limit and not self.training:
            waited = f"waited {limit:.0f} s (supervisor.read_timeout_s)"
            if isinstance(trouble, NoRoom):
                raise NoRoom(f"{trouble}; {waited}")
            raise Unreadable(trouble.file, f"{trouble.why}; {waited}")
        self._set(name, replace(self._states[name], phase="waiting", reason=str(trouble), slot=None))

    def put_back(self, name: str, error: NoRoom | Unreadable) -> None:
        """Have a run wait for another try that was given a slot and could not begin: something could not be read, or
        its version not be written."""
        if name in self._slots:
            self._slots[self._slots.index(name)] = None
            self._lives.pop(name, None)
        self._seen.setdefault(name, _Seen(self._clock()))
        unread = self._unread.setdefault(name, _Unread(FailedReads(self._parent.supervisor.recheck_s)))
        self._states.setdefault(name, ChildState("waiting"))
        self._put_off(name, unread, error)

    def began(self, admission: Admission, step: int, progress: dict[str, int]) -> None:
        """Every rank holds the run now: its orchestrator may begin."""
        self._unread.pop(admission.name, None)
        self._set(
            admission.name,
            ChildState(
                "training",
                slot=admission.slot,
                incarnation=admission.incarnation,
                resume_step=admission.resume.step if admission.resume is not None else None,
                step=step,
                max_steps=admission.experiment.max_steps,
                num_samples=progress.get("num_samples", 0),
                num_tokens=progress.get("num_tokens", 0),
            ),
        )

    def trained(self, name: str, step: int, num_samples: int, num_tokens: int) -> None:
        """Note a run's step."""
        before = self._states[name]
        state = replace(before, step=step, num_samples=num_samples, num_tokens=num_tokens)
        self._set(name, state, write=abs(time.time() - before.time) > STATE_S)  # the clock may have been set back

    def _is_deleted(self, name: str) -> bool:
        """Return whether a run's directory is gone, or going: its files go one by one."""
        end = time.monotonic() + DELETION_S
        while not (is_gone := RUN_YAML not in files.list_dir(self._dir / name)) and time.monotonic() < end:
            time.sleep(DELETION_S / 10)
        return is_gone

    def ended(self, name: str, phase: Phase, reason: str | None) -> None:
        """Free the slot of a run that ended (or never began)."""
        if phase == "failed" and name in self._slots and self._is_deleted(name):
            phase, reason = "removed", f"{DELETED} ({reason})"
        if name in self._slots:
            self._slots[self._slots.index(name)] = None
            self._lives.pop(name, None)
        self._unread.pop(name, None)
        self._stopping.discard(name)
        level = "INFO" if phase in ("done", "stopped") else "ERROR"
        logger.log(level, f"{name}: {phase}" + (f": {reason}" if reason else ""))
        before = self._states.get(name, ChildState("waiting"))
        self._set(name, replace(before, phase=phase, reason=reason, slot=None))
        if phase == "removed":
            self._states.pop(name, None)
            self._clear(self._dir / name)
        else:
            self._seen.setdefault(name, _Seen(self._clock()))

    def _clear(self, path: Path) -> None:
        """Clear a deleted directory again: a step that was under way then may have written into it once more."""
        left = files.list_dir(path)
        if left and set(left) <= OURS:
            try:
                files.remove_tree(path)
            except (StoreError, OSError) as error:
                logger.warning(f"{path} was deleted, and what was written there since cannot be removed: {error}")

    def _set(self, name: str, state: ChildState, *, write: bool = True) -> None:
        before = self._states.get(name)
        written = before.time if before is not None and not write else time.time()
        state = replace(state, parent_incarnation=self._incarnation, time=written)
        self._states[name] = state
        try:
            if write and state.phase != "removed":
                check_incarnation(RunPaths(self._dir), self._incarnation)  # its runs are another trainer's by now
                write_state(self._dir / name, state)
                if state.has_ended:
                    (self._dir / name / STOP_FILE).unlink(missing_ok=True)
        except (StoreError, OSError) as error:  # its directory is gone, or full: the bus still carries the word
            logger.warning(f"the state of {name} could not be written: {error}")
        self._announce(name, state)
