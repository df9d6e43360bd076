"""`python -m tests.support.record_slurm [--suite SUITE]`: what a real Slurm answers, for `tests/unit/test_answers.py`.

Starts a dev cluster (of this machine's Slurm, or of a Debian suite's), has jobs end in every way, asks all that the
product asks, and writes the answers as they came into `tests/data/slurm/VERSION/`. Takes some minutes; root only.
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from prime_hpc.slurm import jobs
from prime_hpc.slurm.client import squeue_command
from prime_hpc.slurm.hostlist import expand_hosts
from tests.support.slurm import DONE, Cluster

SEPARATOR = "\x1f"
DATA = Path(__file__).resolve().parents[1] / "data" / "slurm"
JOB = """
[ -z "$SLURM_RESTART_COUNT" ] || exit 0
trap 'scontrol show job --oneliner "$SLURM_JOB_ID" >"at.$SLURM_JOB_ID"
      scontrol show partition --oneliner "$SLURM_JOB_PARTITION" >"partition.$SLURM_JOB_ID"; exit 0' TERM
env | grep ^SLURM_ | sort >"env.$SLURM_JOB_ID"
touch "began.$SLURM_JOB_ID"
sleep 600 & wait
"""


class Recorder:
    """One cluster's answers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ends: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, Any]] = {}

    def ask(self, name: str, *argv: str) -> str:
        """Ask and keep the answer."""
        done = self.cluster.x(argv)
        self.answers[name] = {
            "argv": list(argv),
            "code": done.returncode,
            "stdout": done.stdout,
            "stderr": done.stderr,
        }
        return done.stdout

    def start(self, *options: str) -> str:
        """A job that waits for its end."""
        job = self.cluster.sbatch(JOB, "--requeue", *options)
        began = self.cluster.shared / f"began.{job}"
        self.cluster.wait_until(began.exists, f"job {job} begins", timeout=90)
        return job

    def end(self, name: str, job: str, timeout: float = 120) -> None:
        """Keep what is said of a job's end."""
        at = self.cluster.shared / f"partition.{job}"
        self.cluster.wait_until(at.exists, f"{name}: SIGTERM", timeout)
        self.cluster.wait_state(job, DONE, timeout)
        self.ends[name] = {
            "log": self.cluster.output(job),
            "job": (self.cluster.shared / f"at.{job}").read_text(),
            "partition": at.read_text(),
            "after": self.cluster.ask("scontrol", "show", "job", "--oneliner", job),
        }
        print(name, file=sys.stderr)

    def all_ends(self) -> None:
        """Every way to end a job that reaches its batch script."""
        limited = self.start("-p", "cpu", "-t", "1")
        cancelled = self.start("-p", "gpu")
        self.cluster.ask("scancel", cancelled)
        self.end("cancelled", cancelled)
        cancelled = self.start("-p", "scavcancel")
        self.cluster.ask("scancel", cancelled)
        self.end("cancelled where preemption cancels", cancelled)
        cancelled = self.start("-p", "scavenge")
        self.cluster.ask("scancel", cancelled)
        self.end("cancelled where preemption requeues", cancelled)
        requeued = self.start("-p", "gpu")
        self.cluster.ask("scontrol", "requeue", requeued)
        self.end("requeued", requeued)
        preempted = self.start("-p", "scavenge"), self.start("-p", "scavcancel")
        self.cluster.drill("preempt", "2")
        self.end("preempted and requeued", preempted[0])
        self.end("preempted and cancelled", preempted[1])
        lost = self.start("-p", "gpu", "-N2")
        self.cluster.drill("power-off", self._other_node(lost))
        self.end("node lost", lost)
        self.ask("nodes, one lost", "scontrol", "show", "node", "--oneliner")
        self.ask("states, one lost", "sinfo", "-h", "-N", "-o", "%N %t", "-p", "gpu")
        self.end("time limit", limited, timeout=200)
        self.cluster.heal()

    def _other_node(self, job: str) -> str:
        nodes = expand_hosts(self.cluster.job(job)["NodeList"])
        return next(node for node in nodes if node != self.cluster.job(job)["BatchHost"])

    def jobs(self) -> None:
        """Jobs of all kinds, as squeue and scontrol show them."""
        plain = self.start("-p", "gpu", "--comment", "prime-hpc:abc x", "-J", "a name|with", "-t", "1:00:00")
        waiting = self.cluster.sbatch(JOB, "-p", "gpu", "--begin=now+1hour")
        self.cluster.sbatch(JOB, "-p", "gpu", "-N4", "--exclusive", "-d", f"afterok:{plain}")
        array = self.cluster.sbatch(JOB, "-p", "cpu", "--array=1-3%1")
        het = self.cluster.sbatch(JOB, "-p", "cpu", "-N1", ":", "-p", "gpu", "-N2", "--gres=gpu:1")
        self.cluster.wait_until((self.cluster.shared / f"began.{het}").exists, "the het job", timeout=60)
        ended = self.cluster.sbatch("exit 3", "-p", "cpu")
        self.cluster.wait_state(ended, DONE)
        time.sleep(1.5)  # the array's first task begins
        self.ask("squeue of this user", *squeue_command(["-u", str(os.getuid())], jobs._FIELDS))
        self.ask("squeue of one job", *squeue_command(["-j", plain], jobs._FIELDS))
        self.ask("squeue of a forgotten job", *squeue_command(["-j", "4999999"], jobs._FIELDS))
        self.ask("squeue --start", "squeue", "--start", "-h", "-j", waiting, "-o", "%S")
        self.ask("steps", "squeue", "-h", "-s", "-j", f"{plain},{het}", "-o", "%i")
        for name, job in {"plain": plain, "waiting": waiting, "array": array, "het": het, "ended": ended}.items():
            self.ask(f"job {name}", "scontrol", "show", "job", "--oneliner", job)
        self.ask("batch script", "scontrol", "write", "batch_script", plain, "-")
        self.ask("change", "scontrol", "update", f"JobId={plain}", "TimeLimit=2:00:00")
        self.ask("job plain, extended", "scontrol", "show", "job", "--oneliner", plain)
        self.ask("variables", "cat", f"env.{plain}")
        self.ask("variables of a het job", "cat", f"env.{het}")
        fields = "JobID,State,ExitCode,Start,End,NodeList,Comment"
        rows = ["--duplicates", "-X", "--noheader", "--parsable2", "--delimiter", SEPARATOR]
        self.cluster.ask("scancel", "-u", "root")
        self.cluster.wait_until(lambda: not self.cluster.ask("squeue", "-h"), "an empty queue", timeout=60)
        time.sleep(3)  # slurmdbd hears of the last ends
        self.ask("sacct", "sacct", *rows, "-u", str(os.getuid()), "-S", "now-1hour", "-E", "now", "-o", fields)

    def settings(self) -> None:
        """What `site probe` and `doctor` ask."""
        self.ask("version", "sbatch", "--version")
        self.ask("ping", "scontrol", "ping")
        self.ask("config", "scontrol", "show", "config")
        self.ask("partitions", "scontrol", "show", "partition", "--oneliner")
        self.ask("node types", "sinfo", "--noconvert", "-a", "-h", "-e", "-o", "%R|%D|%c|%m|%G|%f")
        self.ask("nodes", "scontrol", "show", "node", "--oneliner")
        self.ask("associations", "sacctmgr", "-nP", "show", "associations", "user=root", "format=account")

    def refusals(self) -> None:
        """Errors whose words are read."""
        wrap = ["--wrap", "true"]
        self.ask("sbatch", "sbatch", "--parsable", "-p", "cpu", *wrap)
        self.ask("no such partition", "sbatch", "--parsable", "-p", "nope", *wrap)
        self.ask("too many GPUs", "sbatch", "--parsable", "-p", "gpu", "--gres=gpu:99", *wrap)
        self.ask("too many nodes", "sbatch", "--parsable", "-p", "cpu", "-N", "99", *wrap)
        self.ask("no such constraint", "sbatch", "--parsable", "-C", "nope", *wrap)
        self.ask("no such reservation", "sbatch", "--parsable", "--reservation=nope", *wrap)
        self.ask("no such account", "sbatch", "--parsable", "-A", "nope", *wrap)
        self.ask("no such QOS", "sbatch", "--parsable", "-q", "nope", *wrap)
        self.ask("too long", "sbatch", "--parsable", "-p", "cpu", "-t", "99999999", *wrap)
        self.ask("no such option", "sbatch", "--parsable", "--no-such-option=1", *wrap)
        self.ask("no such job: scontrol", "scontrol", "show", "job", "--oneliner", "4999999")
        self.ask("no such job: scancel", "scancel", "4999999")
        self.ask("no such job: requeue", "scontrol", "requeue", "4999999")
        step = ["srun", "--overlap", "-N1", "-n1"]
        script = "; ".join(
            " ".join([*words, f">{name}.step 2>&1"])
            for name, words in {
                "gres": [*step, "--gres=gpu:3", "true"],
                "nodelist": [*step, "-w", "n99", "true"],
                "command": [*step, "/no/such/program"],
                "exit": ["srun", "--overlap", "-N2", "-n2", "--kill-on-bad-exit=0", "sh", "-c", "'exit $SLURM_PROCID'"],
            }.items()
        )
        job = self.cluster.sbatch(script, "-p", "gpu", "-N2", "--gres=gpu:1")
        self.cluster.wait_state(job, DONE)
        for name in ("gres", "nodelist", "command", "exit"):
            self.ask(f"srun: {name}", "cat", f"{name}.step")
        job = self.cluster.sbatch("until [ -e go ]; do sleep 0.2; done; srun -N2 -n2 true >lost.step 2>&1", "-N2", "-k")
        self.cluster.wait_state(job, "RUNNING")
        self.cluster.drill("power-off", self._other_node(job))
        (self.cluster.shared / "go").touch()
        self.cluster.wait_state(job, DONE, timeout=120)
        self.ask("srun: lost node", "cat", "lost.step")
        self.cluster.drill("kill-controller")
        self.ask("no controller: squeue", "squeue", "-h", "-j", job)
        self.ask("no controller: sbatch", "sbatch", "--parsable", *wrap)
        self.ask("no controller: ping", "scontrol", "ping")
        self.cluster.drill("start-controller")
        self.cluster.heal()


def main() -> int:
    """Record one version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite")
    suite = parser.parse_args().suite
    cluster = Cluster("--accounting", *(["--suite", suite] if suite else []))
    try:
        recorder = Recorder(cluster)
        recorder.settings()
        recorder.refusals()
        recorder.jobs()
        recorder.all_ends()
        version = re.search(r"\d+\.\d+", recorder.answers["version"]["stdout"])
        assert version is not None
        folder = DATA / version[0]
        folder.mkdir(parents=True, exist_ok=True)
        for name, kept in (("ends", recorder.ends), ("answers", recorder.answers)):
            text = json.dumps(kept, indent=1, ensure_ascii=True).replace(os.uname().release, "6.1.0")
            (folder / f"{name}.json").write_text(text + "\n")
        print(folder)
        return 0
    finally:
        cluster.down()


if __name__ == "__main__":
    sys.exit(main())
