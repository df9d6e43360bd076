"""sbatch, squeue, scancel, scontrol, sinfo and sacct on PATH that keep a queue in a file and fail as they are told to.

For failures that a real Slurm does not have on demand: a hang, a lost answer, a refusal. In a test:

    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    fake.behave("sbatch", hang="after")         # takes the job, and never answers
    ...
    assert [job["state"] for job in fake.jobs()] == ["PENDING"]

What the commands do is in `fake_slurm_commands`.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from tests.support.fake_slurm_commands import State, new_job

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct", "sacctmgr", "srun")
PROGRAM = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
from fake_slurm_commands import main
sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
"""
"""Imports the commands: a file that is run is compiled each time."""


class FakeSlurm:
    """A queue that a test looks into and changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "fake-slurm"
        self.bin = self.folder / "bin"
        self.bin.mkdir(parents=True)
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text("ClusterName=fake\n")
        for name in COMMANDS:
            program = self.bin / name
            words = shlex.join(
                [sys.executable, "-SE", "-c", PROGRAM, str(Path(__file__).parent), name, str(self.folder)]
            )
            program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            program.chmod(0o755)

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs to meet this Slurm and no other."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "PRIMEHPC_"))}
        return clean | {"PATH": f"{self.bin}:{os.environ['PATH']}", "SLURM_CONF": str(self.conf)}

    def use(self, monkeypatch: Any) -> None:
        """Put the commands before the real ones for this process."""
        for name in [k for k in os.environ if k.startswith(("SLURM_", "SBATCH_", "PRIMEHPC_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", self.environ["PATH"])
        monkeypatch.setenv("SLURM_CONF", str(self.conf))

    def remove(self, *names: str) -> None:
        """Uninstall commands."""
        for name in names:
            (self.bin / name).unlink()

    def behave(self, command: str, **how: Any) -> None:
        """Change what a command does from now on; without keywords: as it should.

        Args:
            command: e.g. `sbatch`.
            how: `hang`: `before` or `after` it did its work; `code`: fail before doing anything; `stderr`: said beside;
                `late`: seconds after which the work is done by a process of its own, while the command hangs;
                `say`: replaces its answer; `only_once`: the next call behaves again.
        """
        with self._state() as state:
            state["behaviour"][command] = how

    def jobs(self) -> list[dict[str, Any]]:
        """The queue, by job id."""
        with self._state() as state:
            return sorted(state["jobs"], key=lambda job: int(job["id"]))

    def change(self, job_id: str, **fields: Any) -> None:
        """Set fields of a job: `state`, `reason`, `nodes`, `comment`, `restarts`, ...

        Of those that scontrol shows, by its own names: `shown`, and `components` of a het job, by offset.
        """
        with self._state() as state:
            for job in state["jobs"]:
                if job["id"] == job_id:
                    job.update(fields)

    def expect(self, text: str, **how: Any) -> None:
        """Answer `sbatch --test-only` about scripts with this text in them, the first that fits.

        Args:
            text: e.g. `--nodes=2`.
            how: `after`: it would start in so many seconds, `nodes`: on these; `say`: other words; `code`: refused with
                them; `hang`: no answer.
        """
        with self._state() as state:
            state["expected"].append([text, how])

    def limit(self, most: int | None) -> None:
        """Let a user have so many jobs in the queue from now on; None: any number."""
        with self._state() as state:
            state["limit"] = most

    def set_comments(self, text: str | None) -> None:
        """As a site's job_submit plugin, give every job this comment from now on; None: leave them."""
        with self._state() as state:
            state["comment"] = text

    def forget(self, job_id: str) -> None:
        """As the controller does some minutes after a job's end."""
        with self._state() as state:
            state["jobs"] = [job for job in state["jobs"] if job["id"] != job_id]

    def add(self, **fields: Any) -> str:
        """A job that somebody else submitted; returns its id."""
        with self._state() as state:
            return new_job(state, fields)

    def calls(self, command: str | None = None) -> list[list[str]]:
        """Command lines so far."""
        with self._state() as state:
            return [argv for argv in state["calls"] if command is None or argv[0] == command]

    def environment_of(self, job_id: str) -> dict[str, str]:
        """Environment in which sbatch was called for a job."""
        return dict(next(job for job in self.jobs() if job["id"] == job_id)["environ"])

    def _state(self) -> State:
        return State(str(self.folder))
