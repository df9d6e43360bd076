"""`prime-hpc archive RUN DESTINATION`, and `prime-hpc archive --restore FILE FOLDER`.

Exit codes: 0 written and read back, or restored; 1 broken off: a full disk, a damaged file, a file that changed (the
same command goes on where it was), or written without damaged files of batches, which are named; 2 there is no such
run, the command line is wrong, or other runs need what is to be deleted; 3 the run is under way, nothing was copied.
"""

import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from prime_hpc.cli.common import Given, parse, print_json, say
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.archive.archive import delete_source, destination, make_archive
from prime_hpc.launch.archive.contents import choose
from prime_hpc.launch.archive.dependents import dependents
from prime_hpc.launch.archive.restore import restore
from prime_hpc.launch.monitor.run_facts import FINAL
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.runtime.failures import file_error_text
from prime_hpc.store.errors import StoreError
from prime_hpc.store.run_dirs import find_run

_IDLE = (*FINAL, "not started")


def run(argv: list[str], program: str) -> int:
    """Make an archive, or bring a run back from one."""
    given = parse("archive", argv)
    first, second = given.arguments(2, least=2)
    try:
        return _restore(given, Path(first), Path(second)) if "--restore" in given else _archive(given, first, second)
    except ConfigError:
        raise
    except (StoreError, OSError) as error:
        print(f"{program}: error: {file_error_text(error)}", file=sys.stderr)
        return 1


def _archive(given: Given, word: str, target: str) -> int:
    wanted = given.get("--checkpoints") or "last"
    if wanted not in ("all", "last", "none"):
        raise ConfigError(f"--checkpoints {wanted}: must be all, last or none")
    named = find_run(word)
    run_dir = named.resolve()
    owner = run_dir.stat().st_uid
    if "--delete-source" in given and os.geteuid() not in (0, owner):
        # in a shared folder its name could be taken from it all the same
        raise ConfigError(
            f"--delete-source: {run_dir} belongs to another user (uid {owner}), it is not deleted: leave the flag out"
        )
    if not _is_idle(run_dir):
        return 3
    if needed := _needed_by_others(given, run_dir):
        raise ConfigError(f"{needed}: leave --delete-source out, or say --force")
    rollouts, folder = "--rollouts" in given, "--folder" in given
    path = destination(target, run_dir.name, folder=folder)
    done, chosen = make_archive(
        run_dir,
        path,
        wanted,  # type: ignore[arg-type]
        rollouts=rollouts,
        folder=folder,
        say=say,
    )
    for said in done.damaged:
        print(f"error: left out, it is damaged: {said}", file=sys.stderr)
    if "--delete-source" in given and not done.damaged:
        if not _is_idle(run_dir):
            return 3
        if needed := _needed_by_others(given, run_dir):  # by now: copying may have taken hours
            raise StoreError(f"{path} is whole, but {needed}")
        delete_source(run_dir, chosen, choose(run_dir, wanted, rollouts=rollouts))  # type: ignore[arg-type]
        if named.is_symlink():
            named.unlink()
        done.deleted = True
    if "--json" in given:
        print_json(asdict(done))
        return int(bool(done.damaged))
    share = f", {done.packed_bytes / 2**20:.1f} MiB packed" if not folder else ""
    steps = ", ".join(map(str, done.checkpoints)) or "none"
    print(f"{done.path}: {done.num_files} files, {done.num_bytes / 2**20:.1f} MiB{share}; checkpoints: {steps}")
    for note in done.notes:
        print(f"note: {note}")
    print(f"{run_dir} is deleted" if done.deleted else f"{run_dir} is as it was (--delete-source deletes it)")
    return int(bool(done.damaged))


def _needed_by_others(given: Given, run_dir: Path) -> str | None:
    """Say which other runs need what is to be deleted; None: none, or it is to be deleted all the same."""
    if "--delete-source" not in given or "--force" in given or not (found := dependents(run_dir)):
        return None
    others = "; ".join(f"{other} ({word})" for other, word in list(found.items())[:5])
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{run_dir} is not deleted, its files are named by the configs of other runs: {others}{more}"


def _is_idle(run_dir: Path) -> bool:
    """Return whether nothing writes to a run, and nothing will by itself; says so where it is not."""
    status = status_of(run_dir, details=False)
    if status.state in _IDLE:
        return True
    what = f"{run_dir} is {status.state}{f': {status.note}' if status.note else ''}"
    ends = f"prime-hpc cancel {shlex.quote(str(run_dir))}"
    print(f"prime-hpc archive: error: {what}; end it first ({ends})", file=sys.stderr)
    return False


def _restore(given: Given, archive: Path, folder: Path) -> int:
    for flag in ("--checkpoints", "--rollouts", "--folder", "--delete-source", "--force"):
        if flag in given:
            raise ConfigError(f"{flag} says how an archive is made, and goes not with --restore")
    done = restore(archive.expanduser().absolute(), folder.expanduser().absolute())
    if "--json" in given:
        print_json(asdict(done))
        return 0
    print(f"{done.path}: {done.num_files} files, every one as it was archived")
    for note in done.notes:
        print(f"note: {note}")
    resume = f"prime-hpc resume {shlex.quote(str(done.path))}"
    if done.lacks_newest:  # or an attempt would wait for it
        resume += f" --ckpt.resume-step {done.checkpoints[0]}"
    if done.checkpoints and status_of(Path(done.path), details=False).state == "completed":
        print(f"the run is complete; {resume} --max-steps N goes on to a later step")
    elif done.checkpoints:
        print(f"{resume} goes on from step {done.checkpoints[0]}")
    return 0
