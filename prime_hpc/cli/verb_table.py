"""The table of what the command line can do: each verb with its arguments, its flags and their help.

Stated here once: parsing (`common.parse`), help pages and Tab completion read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Flag:
    """A flag of a verb itself."""

    names: tuple[str, ...]
    """Its spellings, the long one last."""
    metavar: str
    """Its value in help pages; empty for a switch."""
    text: str
    """Help; empty: scripts alone use it."""

    @property
    def takes_value(self) -> bool:
        """True if the next word is its value; of `A B` these are arguments of the verb."""
        return self.metavar != "" and " " not in self.metavar


@dataclass(frozen=True)
class Verb:
    """One thing that the command line can do."""

    summary: str
    usage: str
    """The arguments after the verb."""
    flag_rows: tuple[tuple[str, str], ...] = ()
    """Flags of the verb itself, which are no keys of the experiment: `-n, --lines N`, with their help."""
    module: str | None = None
    """Module below `prime_hpc.cli.verbs` that does it; None: it is an entrypoint that runs here."""
    actions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """First words that it takes, each with the flags that go with it; empty: it has no such word."""

    @property
    def takes_experiment(self) -> bool:
        """True if it reads an experiment's file, so that its help lists the experiment's keys."""
        return "FILE" in self.usage and "--KEY VALUE" in self.usage

    @property
    def is_entrypoint(self) -> bool:
        """True if it is a program of its own as well, which begins with a config after `@`."""
        return self.usage.startswith("[@ FILE")

    @cached_property
    def flags(self) -> tuple[Flag, ...]:
        """Its flags; `--follow, --no-follow` are two."""
        found = []
        for spelling, text in self.flag_rows:
            *names, last = spelling.split(", ")
            name, _, metavar = last.partition(" ")
            if name.startswith("--no-"):
                found += [Flag((other,), metavar, text) for other in (*names, name)]
            else:
                found.append(Flag((*names, name), metavar, text))
        return tuple(found)


_TORCHRUN = (
    ("--nnodes N", "by hand, over N machines: the same command on each of them"),
    ("--node-rank R", "number of this machine, 0 for the head"),
    ("--nproc-per-node N", "ranks of each machine (default: trainer.num_ranks over --nnodes)"),
    ("--rdzv-endpoint HOST:PORT", "an address and a free port of machine 0, where all ranks meet"),
    ("--master-addr HOST", "the same in two flags; default: $MASTER_ADDR"),
    ("--master-port PORT", "default: $MASTER_PORT"),
)
"""torchrun's own flags."""
_DRY_RUN = ("--dry-run", "say what would run here; start nothing")

VERBS: dict[str, Verb] = {
    "submit": Verb(
        "Start an experiment as one job: through Slurm where there is one, else on this machine.",
        "FILE [--KEY VALUE ...]",
        (
            ("--follow, --no-follow", "follow the job's log (default: only for a local job)"),
            ("--best", "in the shape of slurm.shapes that is expected first (see plan --when)"),
            ("--from RUN", "with --best: as for plan --when"),
            ("--dry-run", "say what would be submitted; start nothing"),
            ("--json", "print the submit record as JSON"),
        ),
        "experiment.submit",
    ),
    "plan": Verb(
        "Print where each role of an experiment would run and how the job survives; start nothing.",
        "FILE [--KEY VALUE ...]",
        (
            ("--rehearse", "run the train step on fake tensors: peak memory of a rank, by kind (needs torch, no GPU)"),
            ("--gpu-memory-gib GIB", "with --rehearse: memory of one GPU; default: the site profile's"),
            ("--when", "ask Slurm when it would start, and which of slurm.shapes first"),
            ("--timeout S", "with --when: seconds that Slurm may take for an answer (default 20)"),
            ("--from RUN", "with --when: a run by which steps are simulated (default: the newest of this model)"),
            ("--json", "print the plan as JSON"),
        ),
        "experiment.plan",
    ),
    "simulate": Verb(
        "Predict step time, waits, memory and cost of an experiment for this shape and others, from measured runs.",
        "FILE [--KEY VALUE ...]",
        (
            ("--from RUN", "a run that calibrates; several times for several (default: the experiment's own)"),
            ("--shape SHAPE", "another shape: trainer=2,inference=6,async=1,batch=256; several times for several"),
            ("--json", "print as JSON"),
        ),
        "experiment.simulate",
    ),
    "render": Verb(
        "Print the batch script that `submit` would send, or the objects of a run on Kubernetes.",
        "FILE [--KEY VALUE ...]",
        (
            ("--output FILE", "write it there instead"),
            ("--array N", "as one task of an array of N"),
            ("--target NAME", "slurm (default), or kubernetes: for `kubectl apply -f -`"),
            ("--chart DIR", "with --target kubernetes: write a Helm chart there instead"),
        ),
        "experiment.render",
    ),
    "lint": Verb(
        "Say what is wrong with an experiment before it costs anything; needs no cluster.",
        "FILE ... [--KEY VALUE ...]",
        (("--json", "print the findings as JSON"), ("--strict", "warnings fail too")),
        "experiment.lint",
    ),
    "fetch": Verb(
        "Bring models, data sets and benchmarks of an experiment onto shared storage, for nodes without internet.",
        "FILE [--KEY VALUE ...]",
        (
            ("--into DIR", "as HF_HOME (default: where the job's environment will look)"),
            ("--check", "fetch nothing, say what is missing: exit code 1 if anything is"),
            ("--json", "print as JSON"),
        ),
        "experiment.fetch",
    ),
    "preflight": Verb(
        "Check the nodes of this allocation, or (RUN) show what a run's preflight found.",
        "[RUN]",
        (
            ("--json", "print the verdicts as JSON"),
            ("--dir DIR", "shared directory to test"),
            ("--timeout S", "deadline of all checks"),
            ("--allreduce, --no-allreduce", "all-reduce across the nodes (default: with more than one)"),
        ),
        "cluster.preflight",
    ),
    "status": Verb(
        "State, step, reward, attempt, nodes and time left of one run, or of all under a folder.",
        "[RUN|FOLDER]",
        (
            ("--json", "print as JSON"),
            ("--watch", "refresh until interrupted, or until the run is over"),
            ("--all", "every run (default: those under way and the newest 50)"),
        ),
        "run.status",
    ),
    "metrics": Verb(
        "A run's figures in Prometheus' text form; --scrape-config: how Prometheus reads all runs of a folder.",
        "RUN",
        (("--scrape-config", "print a configuration for Prometheus instead, of a FOLDER's runs; makes its token"),),
        "run.metrics",
    ),
    "why": Verb(
        "Who waits for whom now, and who holds the run up: on this machine, or on all nodes of its job.",
        "RUN",
        (
            ("--json", "print as JSON, with every stack"),
            ("--stacks", "show the stacks of all processes"),
            ("--after S", "a wait counts as a hang from so many seconds on (default 60)"),
            ("--timeout S", "give up on nodes that do not answer within so many seconds (default 30)"),
        ),
        "run.why",
    ),
    "logs": Verb(
        "Show a run's logs.",
        "RUN",
        (
            ("-f, --follow", "go on as they grow"),
            (
                "--role ROLE",
                "supervisor (default), trainer, orchestrator, eval, synthesize, inference, teacher, judge, slurm",
            ),
            ("--rank N", "one rank of the trainer, or one server"),
            ("--attempt N", "of that attempt (default: the newest)"),
            ("-n, --lines N", "last N lines (default 50; 0: all)"),
            ("--json", "one JSON object a line"),
        ),
        "run.logs",
    ),
    "shell": Verb(
        "A shell, or one command, where a role of a running run is: on its node, with its environment.",
        "RUN [-- COMMAND ...]",
        (
            (
                "--role ROLE",
                "supervisor (default), trainer, orchestrator, eval, synthesize, inference, teacher or judge",
            ),
            ("--rank N", "rank of the trainer, or number of the server (default: 0)"),
        ),
        "run.shell",
    ),
    "cancel": Verb(
        "End a run: it saves first, unless told not to.",
        "RUN ...",
        (
            ("--now", "do not save"),
            ("--timeout S", "seconds to wait for the save (default 600)"),
            ("--json", "print as JSON"),
        ),
        "run.cancel",
    ),
    "resume": Verb(
        "Start a stopped run again from its newest whole checkpoint.",
        "RUN [--ckpt.resume-step N] [--KEY VALUE ...]",
        (
            ("--follow, --no-follow", "as for submit"),
            ("--dry-run", "as for submit"),
            ("--json", "print the submit record as JSON"),
        ),
        "run.resume",
    ),
    "sweep": Verb(
        "Many experiments: sweep submit|status|results|cancel|resume SWEEP.",
        "submit|status|results|cancel|resume SWEEP [--KEY VALUE ...]",
        (
            ("--dry-run", "say what would run"),
            ("--feed", "submit, resume: more points than Slurm takes at once, sent as slots come free"),
            ("--every S", "with --feed: seconds between two looks at the queue (default 30)"),
            ("--json", "print as JSON"),
            ("--metric NAME", "order the results by this metric"),
            ("--plot FILE", "write the results' plot there"),
            ("--all", "status, results: earlier points too"),
            ("--now", "cancel: do not save"),
            ("--timeout S", "cancel: seconds to wait for the saves"),
        ),
        "experiment.sweep",
        {
            "submit": ("--dry-run", "--feed", "--every", "--json"),
            "status": ("--json", "--all"),
            "results": ("--json", "--all", "--metric", "--plot"),
            "cancel": ("--json", "--now", "--timeout"),
            "resume": ("--dry-run", "--feed", "--every", "--json"),
        },
    ),
    "runs": Verb(
        "The runs below a run whose trainer trains many: runs add|list|remove|resume PARENT.",
        "add PARENT CHILD.yaml [--KEY VALUE ...] | list PARENT | remove|resume PARENT ID",
        (
            ("--id ID", "add: the child's id (default: its name, or its file's)"),
            ("--delete", "remove: delete its directory too"),
            ("--timeout S", "remove: seconds to wait for its save (default 600)"),
            ("--json", "print as JSON"),
        ),
        "run.runs",
        {
            "add": ("--id", "--json"),
            "list": ("--json",),
            "remove": ("--delete", "--timeout", "--json"),
            "resume": ("--json",),
        },
    ),
    "diff": Verb(
        "What differs between two runs (config, code, packages, figures), or two files of figures.",
        "RUN_A RUN_B",
        (("--json", "print as JSON"),),
        "run.diff",
    ),
    "report": Verb(
        "One HTML page of a run, several, or a sweep: curves, timeline, accounting, rollouts; needs no network.",
        "RUN|FOLDER ...",
        (
            ("--output FILE", "write it there (default: report.html in the run directory; of several here)"),
            ("--open", "open it in the browser of this machine"),
            ("--json", "print figures and accounting as JSON"),
        ),
        "run.report",
    ),
    "usage": Verb(
        "What runs cost: hours charged, effective, lost and queued, by run, sweep or user.",
        "[RUN|SWEEP|FOLDER ...]",
        (
            ("--since WHEN", "leave out what was before: 2026-11-01, 2026-11-01T12:00, or 36h, 7d, 4w ago"),
            ("--by WHAT", "a row a run (default), sweep or user (who owns the run directory)"),
            ("--json", "print as JSON"),
        ),
        "run.usage",
    ),
    "replay": Verb(
        "Train again on a run's stored batches, without inference, and compare with what was recorded, bit for bit.",
        "RUN",
        (
            ("--steps A:B", "compare these steps (default: all that are stored)"),
            ("--from N", "begin at the checkpoint of step N (default: the nearest whole one before A)"),
            ("--ranks N", "another number of trainer ranks"),
            ("--keep DIR", "keep what the replay writes"),
            ("--timeout S", "deadline"),
            ("--json", "print as JSON"),
        ),
        "run.replay",
    ),
    "export": Verb(
        "Write a run's rollouts into one Parquet file, or (--merged) an adapter and its base as one model directory.",
        "RUN",
        (
            ("--output FILE", "default: rollouts.parquet in the run directory"),
            ("--steps A:B", "of these steps"),
            ("--compression NAME", "zstd (default), snappy, gzip or none"),
            ("--merged STEP|latest", "instead: this step's weights as a whole model, an adapter with its base model"),
            ("--dtype NAME", "with --merged: float32, bfloat16 or float16"),
            ("--json", "print as JSON"),
        ),
        "run.export",
    ),
    "archive": Verb(
        "Pack what is final of a run that is over into one verified file, or bring it back from there.",
        "RUN DESTINATION | --restore FILE FOLDER",
        (
            ("--checkpoints WHICH", "all, last (default) or none"),
            ("--rollouts", "batches too"),
            ("--folder", "as plain files below DESTINATION, not as one packed file"),
            ("--delete-source", "delete the run once its archive is verified"),
            ("--force", "with --delete-source: though other runs' configs name files of it"),
            ("--restore", "the other way round: the run directory from an archive"),
            ("--json", "print as JSON"),
        ),
        "run.archive",
    ),
    "doctor": Verb(
        "Say what of this machine, its Slurm and a directory would trouble a run.",
        "[--path DIR]",
        (
            ("--path DIR", "measure this directory"),
            ("--other DIR2", "the same directory through a second mount: measures what each sees of the other"),
            ("--json", "print as JSON"),
        ),
        "cluster.doctor",
    ),
    "site": Verb(
        "Site profiles: site list | show NAME | probe.",
        "list | show NAME | probe",
        (("--output FILE", "where probe writes its draft"), ("--json", "print as JSON")),
        "cluster.site",
        {"list": ("--json",), "show": ("--json",), "probe": ("--output", "--json")},
    ),
    "env": Verb(
        "The Python environment as one file, which a job's nodes unpack or mount: env pack | show FILE.",
        "pack | show FILE",
        (
            ("--output FILE", "pack: write it there (default: beside the environment)"),
            ("--format KIND", "pack: squashfs (default where mksquashfs is), tar.zst or tar.gz"),
            ("--mount", "pack: nodes mount the squashfs (squashfuse_ll) and unpack it only where they cannot"),
            ("--json", "print as JSON"),
        ),
        "cluster.env",
        {"pack": ("--output", "--format", "--mount", "--json"), "show": ("--json",)},
    ),
    "completion": Verb(
        'Shell completion: eval "$(prime-hpc completion bash)".',
        "bash|zsh|fish",
        (("--words WORDS", ""), ("--line LINE", "")),
        "completion",
        dict.fromkeys(("bash", "zsh", "fish"), ()),
    ),
    "rl": Verb(
        "Train by reinforcement, in the foreground: orchestrator, trainer and, if named, inference servers.",
        "[@ FILE] [--trainer @ FILE] [--orchestrator @ FILE] [--inference @ FILE] [--KEY VALUE ...]",
        (_DRY_RUN,),
    ),
    "sft": Verb("Supervised fine-tuning, in the foreground.", "[@ FILE ...] [--KEY VALUE ...]", (*_TORCHRUN, _DRY_RUN)),
    "trainer": Verb("The trainer alone.", "[@ FILE ...] [--KEY VALUE ...]", _TORCHRUN),
    "orchestrator": Verb("The orchestrator alone.", "[@ FILE ...] [--KEY VALUE ...]"),
    "eval": Verb(
        "Evaluate a model, a run's versions or an API on environments, in the foreground; or compare two evaluations.",
        "[@ FILE ...] --environment-ids A,B [--KEY VALUE ...] | --compare A B",
        (
            ("--compare A B", "two evaluations' run directories: paired differences with their tests"),
            _DRY_RUN,
            ("--json", "print the summary (the comparison, the plan) as JSON"),
        ),
        "experiment.eval",
    ),
    "serve": Verb(
        "Serve the tinker client, in the foreground: its users train adapters on your own nodes, step by step.",
        "--tinker [@ FILE ...] [--KEY VALUE ...]",
        (("--tinker", "the protocol of the tinker client (of PyPI)"),),
        "experiment.serve",
    ),
    "synthesize": Verb(
        "Have a teacher play environments or answer prompts, in the foreground: rows for `sft`, or replies in files.",
        "[@ FILE ...] --environment-ids A,B | --prompts FILE [--KEY VALUE ...]",
        (_DRY_RUN, ("--json", "print the report (the plan) as JSON")),
        "experiment.synthesize",
    ),
    "inference": Verb("An inference server alone, kept until it is interrupted.", "[@ FILE ...] [--KEY VALUE ...]"),
}
