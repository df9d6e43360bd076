"""Lives that begin while reads fail: the real supervisor up to its first role, in this process.

`Prepared` holds a run that saved twice and went on a few steps: of kind `rl` or `sft`, with checkpoints below the run
directory or (`path`) on a file system of their own, or two runs below a parent (`many`). `try_fault` copies it, lets a
life begin with one read broken, then another without faults, and compares: what was whole is there, under its name;
both lives go on from the newest checkpoint, or the first one ends, with the reason and a code that is not 0.
"""

import contextlib
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment, write_snapshot
from prime_hpc.config.child_config import as_child
from prime_hpc.config.snapshot import share
from prime_hpc.store.attempts import Attempt, read_attempts
from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.store.io import files
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.run_paths import RunPaths, list_steps
from prime_hpc.supervisor import main
from prime_hpc.supervisor.attempt import early_end, resume
from prime_hpc.trainer.multi import admission as admit
from prime_hpc.trainer.multi import run_slots
from tests.faults.reads import Fault, Point, ReadFaults
from tests.support.checkpoints import make_checkpoint, make_weights

SAVED = (10, 20)
BEYOND = 22
"""Steps of the first life: two checkpoints, and batches and versions after them."""
PATIENCE_S = 0.12
ADMIT_S = 1.0
"""A run that was not given its slot so long after the others waits for something."""
TURN_S = 0.005
CHILDREN = ("run_a", "run_b")
KINDS = ("rl", "sft", "path", "many")
WORDS = (
    "cannot be read now",
    "cannot be looked at",
    "cannot be listed",
    "is passed over as long as",
    "is not what was written there",
    "I/O error",
    "not writable",
)


@dataclass
class Outcome:
    """What came of a fault."""

    kind: str
    fault: Fault
    reached: bool = False
    code: int | None = None
    deleted_whole: list[str] = field(default_factory=list)
    started_over: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """An attempt that ended without its reason, or a second one that did not go on."""

    def words(self) -> list[str]:
        """All findings."""
        names = ("deleted_whole", "started_over", "skipped", "duplicated", "mismatches", "failed")
        return [f"{self.kind}: {self.fault}: {name}: {item}" for name in names for item in getattr(self, name)]


class Prepared:
    """A run that has lived once, and its copies."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.folder = kind, folder
        self.home = folder / f"{kind}-prepared"
        self.home.mkdir(parents=True)
        self._make()
        self._copies = 0

    def _experiment(self, home: Path) -> Experiment:
        rl = self.kind != "sft"
        tree: dict[str, Any] = {
            "output_dir": str(home / "outputs"),
            "name": "x",
            "max_steps": 40,
            "kind": "rl" if rl else "sft",
            "model": {"name": str(home / "model")},
            "supervisor": {"read_timeout_s": PATIENCE_S, "recheck_s": 0.05},
            "ckpt": {"path": str(home / "mount" / "checkpoints")} if self.kind == "path" else {},
        }
        if self.kind == "many":
            tree |= {"model": {"name": str(home / "model"), "lora": {}}, "ckpt": None}
            tree["orchestrator"] = {"sampling": {"max_tokens": 16}}
            tree["trainer"] = {"max_concurrent_runs": 2}
        elif rl:
            tree["orchestrator"] = {"env": [{"id": "reverse-text"}], "client": {"base_url": "http://127.0.0.1:9/v1"}}
        else:
            tree["trainer"] = {"data": {"fake": {"batch_size": 2, "seq_len": 8}}}
        return Experiment.model_validate(tree)

    def _make(self) -> None:
        (self.home / "model").mkdir()
        (self.home / "model" / "config.json").write_text('{"hidden_size": 32, "vocab_size": 300}')
        (self.home / "mount").mkdir()
        experiment = self._experiment(self.home)
        write_snapshot(experiment, experiment.run_dir, ["test"])
        for name in CHILDREN if self.kind == "many" else ():
            write_snapshot(as_child(experiment, experiment.run_dir, name), experiment.run_dir / name, ["test"], SHARED)
        first = begin(self, self.home, None)
        assert first.code == 0, first.words
        for paths in self.runs(self.home):
            for step in range(1, BEYOND + 1):
                if self.kind != "sft":
                    make_weights(paths, step, 1)
                if step in SAVED:
                    make_checkpoint(paths, step, kind="sft" if self.kind == "sft" else "rl", incarnation=1)
                elif self.kind != "sft" and step > BEYOND - 2:
                    _make_batch(paths, step)
        end_attempts(experiment.run_dir, max(SAVED) if self.kind != "many" else 2 * max(SAVED))

    def runs(self, home: Path) -> list[RunPaths]:
        """The runs that have checkpoints."""
        run_dir = home / "outputs" / "x"
        if self.kind == "many":
            return [RunPaths(run_dir / name) for name in CHILDREN]
        return [RunPaths(run_dir, home / "mount" / "checkpoints" if self.kind == "path" else None)]

    def copy(self) -> Path:
        """A fresh copy in the place where the original was: paths in its files stay true."""
        self._copies += 1
        home = self.folder / f"{self.kind}-run"
        if home.exists():
            shutil.rmtree(home)
        shutil.copytree(self.home, home, symlinks=True)
        for path in home.rglob("*"):
            if path.is_file() and path.suffix in (".yaml", ".json", ".toml", ".jsonl"):
                text = path.read_bytes()
                if path.name != "manifest.json" and os.fsencode(self.home) in text:
                    path.write_bytes(text.replace(os.fsencode(self.home), os.fsencode(home)))
        return home

    def contents(self, home: Path) -> dict[str, str]:
        """Every whole artifact by its name -> digest; set aside or not."""
        found = {}
        for paths in self.runs(home):
            for parent in (paths.checkpoints, paths.weights, paths.rollouts):
                for path in sorted(parent.iterdir()) if parent.is_dir() else []:
                    with contextlib.suppress(ArtifactError):
                        found[f"{paths.root.name}/{parent.name}/{path.name}"] = read_manifest(path).digest
        return found


SHARED = share(["test"])


def _make_batch(paths: RunPaths, step: int) -> None:
    from prime_hpc.store.batch.rank_batch import RankBatch
    from prime_hpc.store.batch.rank_files import write_batch

    write_batch(paths, step, [RankBatch.empty(1)], state={"step": step}, incarnation=1)


def end_attempts(run_dir: Path, saved: int | None) -> None:
    """As if the newest life had ended like any other."""
    path = run_dir / "attempts.jsonl"
    text = path.read_text().replace('"ended": null', '"ended": 1.0')
    path.write_text(text.replace('"saved_step": null', f'"saved_step": {saved or "null"}'))


@dataclass
class Begun:
    """An attempt's beginning."""

    code: int
    words: str
    steps: dict[str, int | None] = field(default_factory=dict)
    """Run -> the step from which it goes on."""


class _Stub:
    """In the place of the supervisor's main loop: the start is over."""

    on_start: Callable[[], None] = staticmethod(lambda: None)
    left = None
    incarnation = 0
    """Of the newest attempt."""

    def __init__(self, experiment: Experiment, run_dir: Path, attempt: Attempt, *_: Any) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        _Stub.incarnation = attempt.incarnation
        self.controls = _[-1]

    def run(self) -> int:
        """Nothing is trained."""
        self.controls.restore()
        return 0


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Waits of minutes are moments here."""
    short = [
        (files, "STALE_S", 0.02),
        (files, "VISIBLE_S", 0.05),
        (early_end, "LOAD_S", PATIENCE_S),
        (resume, "READ_DEADLINE_S", 0.02),
        (admit, "READ_DEADLINE_S", 0.02),
        (run_slots, "LOOK_S", 0.01),
        (run_slots, "UNREAD_S", 0.02),
        (run_slots, "UNCHANGED_S", 60.0),
        (main, "Supervisor", _Stub),
        (main, "write_report", lambda *_, **__: []),
        (main, "setup_logger", lambda *_, **__: None),
    ]
    saved = [(module, name, getattr(module, name)) for module, name, _ in short]
    for module, name, value in short:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def begin(prepared: Prepared, home: Path, faults: ReadFaults | None) -> Begun:
    """An attempt of the run, up to where its roles would start (`many`: up to where its runs have their slots)."""
    run_dir = home / "outputs" / "x"
    said: list[str] = []
    sink = logger.add(lambda message: said.append(str(message)), level="WARNING", format="{message}")
    context = faults.installed() if faults is not None else contextlib.nullcontext()
    out, err = io.StringIO(), io.StringIO()
    result = Begun(1, "")
    try:
        with shortened(), context, contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            result.code = main.supervise(run_dir, {"CUDA_VISIBLE_DEVICES": "", "PATH": os.environ["PATH"]})
            if prepared.kind == "many" and result.code == 0:
                result.steps = _admit_all(run_dir)
    except (StoreError, OSError) as error:
        result.code = 1
        said.append(str(error))
    finally:
        logger.remove(sink)
    result.words = err.getvalue() + "".join(said)
    if prepared.kind != "many" and result.code == 0:
        result.steps = {"x": read_attempts(run_dir / "attempts.jsonl")[-1]["resume_step"]}
    return result


def _admit_all(run_dir: Path) -> dict[str, int | None]:
    """What trainer rank 0 does with the runs below a parent. One that waits, for something of it cannot be read, is not
    in the answer: the others train."""
    parent = early_end.load_patiently(run_dir)
    now = 0.0  # advances with the turns: a machine that stands still must not end the patience before its last try
    own = run_slots.RunSlots(parent, run_dir, _Stub.incarnation, lambda *_: None, lambda: now)
    steps: dict[str, int | None] = {}
    end = ADMIT_S
    while len(steps) < len(CHILDREN) and now < end:
        own.look(now=True)
        while (admission := own.admit()) is not None:
            steps[admission.name] = admission.resume.step if admission.resume is not None else None
            own.began(admission, steps[admission.name] or 0, {})
            end = now + ADMIT_S
        ended = [n for n in CHILDREN if n in own._states and own.state(n).has_ended]
        if ended:
            raise StoreError(f"{ended} ended: {own.state(ended[0]).reason}")
        time.sleep(TURN_S)
        now += TURN_S
    return steps


def record(prepared: Prepared) -> list[Point]:
    """All reads of an attempt that begins without faults."""
    home = prepared.copy()
    faults = ReadFaults(roots_of(home), normal=normal)
    begun = begin(prepared, home, faults)
    assert begun.code == 0, begun.words
    return list(dict.fromkeys(faults.points))


def roots_of(home: Path) -> dict[str, Path]:
    """What lies on the shared file system."""
    return {"run": home / "outputs", "mount": home / "mount", "model": home / "model"}


def normal(text: str) -> str:
    """A path without what differs between attempts."""
    from tests.faults.inject import normal as plain

    return plain(Path("/" + text), "/")


def try_fault(prepared: Prepared, fault: Fault) -> Outcome:
    """An attempt begins with a fault, then one without."""
    outcome = Outcome(prepared.kind, fault)
    home = prepared.copy()
    before = prepared.contents(home)
    faults = ReadFaults(roots_of(home), fault, normal)
    first = begin(prepared, home, faults)
    outcome.reached, outcome.code = faults.reached, first.code
    names = CHILDREN if prepared.kind == "many" else ("x",)
    waits = [name for name in names if name not in first.steps]
    if first.code == 0:
        began = tuple(name for name in names if name not in waits) if fault.for_ever else names
        _compare_steps(first, began, "the attempt with the fault", outcome)
    if (first.code or waits) and not any(words in first.words for words in WORDS):
        outcome.failed.append(f"ended with code {first.code} and said only: {first.words[-300:]!r}")
    if not fault.for_ever and first.code:
        outcome.failed.append(f"one failed read ended the life (code {first.code}): {first.words[-300:]!r}")
    _compare_tree(prepared, home, before, outcome)
    if (home / "outputs" / "x" / "attempts.jsonl").exists():
        end_attempts(home / "outputs" / "x", None)
    second = begin(prepared, home, None)
    if second.code:
        outcome.failed.append(f"the next attempt ended with code {second.code}: {second.words[-300:]!r}")
    else:
        _compare_steps(second, names, "the next attempt", outcome)
    _compare_tree(prepared, home, before, outcome)
    for paths in prepared.runs(home):
        beyond = [n for n in list_steps(paths.rollouts) if n > max(SAVED)]
        outcome.duplicated += [f"batch {n} is there and would be made again" for n in beyond]
    return outcome


def _compare_steps(begun: Begun, names: tuple[str, ...], who: str, outcome: Outcome) -> None:
    for name in names:
        step = begun.steps.get(name)
        if step != max(SAVED):
            outcome.started_over.append(f"{who}: {name} goes on from step {step}, {max(SAVED)} was saved")


def _compare_tree(prepared: Prepared, home: Path, before: dict[str, str], outcome: Outcome) -> None:
    """What was whole up to the newest checkpoint is there under its name; what is after it may be gone."""
    now = prepared.contents(home)
    kept = list(now.values())
    for name, digest in before.items():
        step = int(name.rpartition("_")[2])
        if step > max(SAVED):
            continue
        if name not in now:
            where = outcome.skipped if "/rollouts/" in name else outcome.deleted_whole
            where.append(f"{name} is {'set aside' if digest in kept else 'gone'}")
        elif now[name] != digest:
            outcome.mismatches.append(f"{name} is another")
