"""Name who holds a run up, from what was seen of its processes: the chain of waiting is followed to its end. Pure.

trainer waits for batch n -> orchestrator waits for episodes -> the environment, or the engine that plays them.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prime_hpc.config.run_files import ENGINE_ROLES
from prime_hpc.runtime import activity
from prime_hpc.store.io.room import WAITS
from prime_hpc.supervisor.stalls import engines
from prime_hpc.supervisor.stalls.labels import in_kernel, label, owner, phase
from prime_hpc.supervisor.stalls.stacks import busy_episode, innermost, main_stack, stacks_of

Row = dict[str, Any]
PATIENCE_S = 60.0
"""A wait that has lasted longer counts as a hang, unless told otherwise."""
_BUSY_CPU = 0.2
_ENGINES_ADVICE = "the supervisor starts the server again when its health route has failed for long enough; see its log"
_FILE_CODE = (
    "(io/",
    "store/artifact",
    "store/batches",
    "batch/rank_files",
    "store/weights",
    "observe/metrics",
    "atomic_write",
    "status_file",
)
"""Code that waits for files, in frames as they are shown."""


@dataclass
class Diagnosis:
    """The answer to "who waits for whom"."""

    culprit: str = ""
    """It holds the run up: a few words that begin with the role and its rank; "" where nobody does."""
    kind: str = "works"
    """`stopped`, `file system`, `environment`, `engine`, `rank`, `orchestrator`, `trainer`, `supervisor`, `gone`,
    `node`, `works` (nobody hangs), `silent` (its processes tell nothing)."""
    role: str = ""
    index: int | None = None
    host: str = ""
    pid: int | None = None
    where: str = ""
    """The line of code."""
    seconds: float | None = None
    is_hang: bool = False
    chain: list[str] = field(default_factory=list)
    """Waiters in order: the last one holds up all others."""
    evidence: list[str] = field(default_factory=list)
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def headline(self) -> str:
        """Return the answer in one line."""
        if not self.culprit:
            return "nobody hangs" + (f": {self.chain[-1]}" if self.chain else "")
        held = "" if self.seconds is None else f", for {self.seconds:.0f} s"
        return f"{self.culprit}{f', in {self.where}' if self.where else ''}{held}"


def diagnose(
    rows: Sequence[Row],
    probes: Mapping[str, Row],
    *,
    patience_s: float = PATIENCE_S,
    now: float | None = None,
    silent: Collection[str] = (),
) -> Diagnosis:
    """Name who holds the run up.

    Args:
        rows: of its processes on all nodes, as `runtime.look.look` returns them.
        probes: what the run directory's file system answered, by host, as `runtime.look.probe` does.
        patience_s: a wait that has lasted longer is a hang.
        silent: nodes that said nothing.
    """
    scene = _Scene(rows, time.time() if now is None else now, patience_s)
    found = (
        _stopped(scene)
        or _file_system(scene, probes)
        or _without_room(scene)
        or _silent(scene, silent)
        or _of_roles(scene)
    )
    found.evidence += [line for line in scene.notes if line not in found.evidence]
    if found.seconds is not None:
        found.seconds = round(found.seconds, 1)
    return found


class _Scene:
    """The processes by role."""

    def __init__(self, rows: Sequence[Row], now: float, patience_s: float) -> None:
        self.rows, self.now, self.patience_s = rows, now, patience_s
        self.speaking = [row for row in rows if row["word"]]
        self.notes = [
            f"{label(row, rows)} on {row['host']} is a zombie (process {row['pid']}, {row['comm']})"
            for row in rows
            if row["state"] == "Z"
        ]

    def of(self, *roles: str) -> list[Row]:
        """Those of some roles, by rank; a server's own engines are parts of it."""
        found = [row for row in self.speaking if row["word"]["role"] in roles and not row["word"].get("part")]
        return sorted(found, key=lambda row: (row["word"]["role"], row["word"]["index"]))

    def since(self, row: Row) -> float:
        """Seconds in the present phase."""
        return max(0.0, self.now - float(row["word"].get("since", self.now)))

    def details(self, row: Row, name: str) -> Any:
        return ((row.get("answer") or {}).get("details") or {}).get(name)

    def made(self, row: Row, kind: str, culprit: str, **more: Any) -> Diagnosis:
        """Name a process as the cause."""
        word = owner(row, self.rows)
        return Diagnosis(
            culprit,
            kind,
            str(word.get("role", "")),
            word.get("index"),
            row["host"],
            row["pid"],
            **{"is_hang": True, **more},
        )


# ------------------------------------------------------------------------------------------------ stopped, files


def _stopped(scene: _Scene) -> Diagnosis | None:
    """SIGSTOP, a debugger, or a suspended job: the kernel says so, and no other evidence outweighs it."""
    stopped = [row for row in scene.rows if row["state"] in ("T", "t") and owner(row, scene.rows)]
    if not stopped:
        return None
    order = {name: n for n, name in enumerate(("supervisor", "agent", "environment", *ENGINE_ROLES, "orchestrator"))}
    first = min(
        stopped,
        key=lambda row: (not row["word"], -order.get(owner(row, scene.rows)["role"], 9), bool(row["word"].get("part"))),
    )
    everybody = all(row in stopped for row in scene.speaking)
    who = "every process of the run" if everybody else label(first, scene.rows)
    evidence = [
        f"{label(row, scene.rows)} on {row['host']}: process {row['pid']} is stopped (state {row['state']})"
        for row in stopped[:8]
    ]
    word = first["word"]
    if word:
        called = engines.call_text(first, scene.now)
        evidence.append(f"before it was stopped it was at {phase(word)}{called and ', '}{called}")
    return scene.made(
        first,
        "stopped",
        f"{who} on {first['host']} is stopped (process {first['pid']})",
        evidence=evidence,
        chain=_waiting_chain(scene),
        advice="the job is suspended: Slurm goes on with it, or its staff do (`scontrol resume JOB`)"
        if everybody
        else f"somebody sent it SIGSTOP, or a debugger holds it: `kill -CONT {first['pid']}` on {first['host']}",
    )


def _file_system(scene: _Scene, probes: Mapping[str, Row]) -> Diagnosis | None:
    """Look for a run directory that does not answer, or processes that the kernel holds in an input or output."""
    hanging = {host: probe for host, probe in probes.items() if "hangs" in probe}
    held = [row for row in scene.rows if row["waits"] or row["state"] == "D"]
    lines = [
        f"{label(row, scene.rows)} on {row['host']} (process {row['pid']}) waits in the kernel ({in_kernel(row)})"
        for row in held[:8]
    ]
    if hanging:
        hosts = ", ".join(sorted(hanging))
        asked = [
            f"a listing of the run directory on {h} had no answer within {p['hangs']:g} s" for h, p in hanging.items()
        ]
        workers = scene.of("trainer", "orchestrator")
        in_files = [line for row in scene.speaking if (line := _in_files(row, scene))]
        return Diagnosis(
            f"the file system of the run directory on {hosts} does not answer",
            "file system",
            host=hosts,
            seconds=max((scene.since(r) for r in workers if _in_files(r, scene)), default=None),
            is_hang=True,
            chain=_waiting_chain(scene),
            evidence=asked + lines + in_files[:6],
            advice="the run goes on when it answers again; tell the site's staff (`df` and `ls` hang there too)",
        )
    if not held:
        return None
    first = held[0]
    where = innermost(main_stack(first)) if first["word"] else ""
    return scene.made(
        first,
        "file system",
        f"{label(first, scene.rows)} on {first['host']} waits in the kernel for a device or a file system",
        where=where,
        evidence=lines,
        chain=_waiting_chain(scene),
        advice="a file system or a driver does not answer this process: see the kernel's log (`dmesg`) on that node",
    )


def _without_room(scene: _Scene) -> Diagnosis | None:
    """Look for processes that wait for room for what they write. One that goes on without, as the trainer does without
    a checkpoint, is noted alone: it holds nobody up."""
    blocked = [row for row in scene.speaking if row["word"].get("blocked")]
    waiting = [row for row in blocked if WAITS in row["word"]["blocked"]]
    told = [f"{label(row, scene.rows)} on {row['host']}: {row['word']['blocked']}" for row in waiting or blocked]
    if not waiting:
        scene.notes += told
        return None
    advice = "free space, or have the quota raised: it goes on by itself (supervisor.write_timeout_s)"
    more = {"evidence": told[1:8], "chain": _waiting_chain(scene), "advice": advice}
    return scene.made(waiting[0], "file system", told[0], **more)


def _silent(scene: _Scene, silent: Collection[str]) -> Diagnosis | None:
    if not silent:
        return None
    hosts = ", ".join(silent)
    advice = "the node is down, or its Python hangs with the file system that it lies on: `scontrol show node`"
    chain = _waiting_chain(scene)
    return Diagnosis(f"{hosts} did not answer", "node", host=hosts, is_hang=True, chain=chain, advice=advice)


def _in_files(row: Row, scene: _Scene) -> str:
    """Say which line of the product's own file access a process stands in."""
    for _, stack in stacks_of(row):
        frame = innermost(stack)
        if any(part in frame for part in _FILE_CODE):
            return f"{label(row, scene.rows)} on {row['host']} is in {frame}"
    return ""


# ------------------------------------------------------------------------------------------------ who waits for whom


def _line(scene: _Scene, row: Row) -> str:
    return f"{label(row, scene.rows)}: {phase(row['word'])} for {scene.since(row):.0f} s"


def _waiting_chain(scene: _Scene) -> list[str]:
    """Return one line for each of trainer rank 0, orchestrator and servers."""
    trainer, orchestrator = scene.of("trainer")[:1], scene.of("orchestrator")
    return [_line(scene, row) for row in (*trainer, *orchestrator)]


def _of_roles(scene: _Scene) -> Diagnosis:
    if not scene.speaking:
        return Diagnosis(
            kind="silent",
            evidence=[f"{row['comm']} (process {row['pid']}) is in state {row['state']}" for row in scene.rows[:8]],
            advice="its processes tell nothing of themselves: another version of prime-hpc, or they have just begun",
        )
    trainer = scene.of("trainer")
    if trainer and trainer[0]["word"]["phase"] != "wait":
        return _in_trainer(scene, trainer)
    players = scene.of("orchestrator", "eval", "synthesize")
    if not players and (not trainer or trainer[0]["word"].get("awaits") in (activity.CLIENTS, activity.RUNS)):
        return _without_players(scene)
    if not players:
        row = trainer[0]
        return scene.made(
            row,
            "gone",
            f"the orchestrator for which {label(row, scene.rows)} waits has no process",
            seconds=scene.since(row),
            is_hang=scene.since(row) > scene.patience_s,
            advice="see its log, and whether its node answers",
        )
    chain = [_line(scene, row) for row in trainer[:1]]
    return _in_orchestrator(scene, players[0], chain)


def _without_players(scene: _Scene) -> Diagnosis:
    """Only servers, agents or the supervisor are there yet, or nobody is asked for anything."""
    sick = _sick_engine(scene, {})
    if sick is not None and sick.is_hang:
        return sick
    rows = scene.of("trainer") or scene.speaking
    youngest = max(rows, key=lambda row: row["word"].get("since", 0.0))
    waited = scene.since(youngest)
    found = scene.made(youngest, "works", "", is_hang=False, seconds=waited)
    found.chain = [_line(scene, row) for row in rows if row["word"]["role"] != "agent"]
    return found


def _in_trainer(scene: _Scene, ranks: list[Row]) -> Diagnosis:
    """Look into the step itself: a rank that did not come to a collective, or all of them at work."""
    late, told = _late_rank(scene, ranks)
    row = late or ranks[0]
    waited = max(scene.since(rank) for rank in ranks)
    hangs = waited > scene.patience_s
    where = innermost(main_stack(row))
    chain = [_line(scene, rank) for rank in ranks[:8]]
    if not hangs:
        return scene.made(row, "works", "", where=where, seconds=waited, is_hang=False, chain=chain)
    if late is not None:
        culprit = f"{label(late, scene.rows)} on {late['host']} did not come to where the other ranks wait"
        advice = "see its stack; if it computes, its share of the batch or its node is slow"
        return scene.made(late, "rank", culprit, where=where, seconds=waited, chain=chain, evidence=told, advice=advice)
    culprit = f"{label(row, scene.rows)} on {row['host']} is at {phase(row['word'])}"
    evidence = [
        *told,
        *(f"{label(r, scene.rows)}: {r['cpu']:.0%} of a core, {innermost(main_stack(r))}" for r in ranks[:8]),
    ]
    advice = "all ranks are in the same place: the network between them, or a GPU that does not answer (see its Xid)"
    return scene.made(
        row, "trainer", culprit, where=where, seconds=waited, chain=chain, evidence=evidence, advice=advice
    )


def _late_rank(scene: _Scene, ranks: list[Row]) -> tuple[Row | None, list[str]]:
    """Find the rank for which the others wait: by the flight recorder's numbers, by phases, by who computes."""
    if len(ranks) < 2:
        return None, []
    records = {row["word"]["index"]: scene.details(row, "collectives") or [] for row in ranks}
    last = {rank: entries[0] for rank, entries in records.items() if entries and entries[0].get("number") is not None}
    told = [
        f"rank {rank}: its last collective is number {e['number']} of {e['group']}, {e['name']} of {e['sizes']}"
        f"{' (over)' if e['is_over'] else ''}"
        for rank, e in sorted(last.items())[:16]
    ]
    by_rank = {row["word"]["index"]: row for row in ranks}
    if len(last) == len(ranks) and len({entry["group"] for entry in last.values()}) == 1:
        fewest = min(last, key=lambda rank: last[rank]["number"])
        if last[fewest]["number"] < max(entry["number"] for entry in last.values()):
            return by_rank[fewest], told
    mute = [row for row in ranks if not row.get("answer")]
    if len(mute) == 1:
        return mute[0], [*told, f"rank {mute[0]['word']['index']} does not answer: a call in C holds its interpreter"]
    for tell in (lambda r: r["word"]["phase"], lambda r: r["cpu"] > _BUSY_CPU):
        odd = _odd_one(ranks, tell)
        if odd is not None:
            return odd, told
    return None, told


def _odd_one(ranks: Iterable[Row], tell: Any) -> Row | None:
    """Return the rank that alone differs from all others; of two, the one that computes."""
    ranks = list(ranks)
    counts = Counter(tell(row) for row in ranks)
    if len(counts) != 2:
        return None
    few = min(counts, key=lambda key: counts[key])
    if counts[few] == 1 and len(ranks) > 2:
        return next(row for row in ranks if tell(row) == few)
    busy = [row for row in ranks if row["cpu"] > _BUSY_CPU]
    return busy[0] if len(busy) == 1 else None


def _in_orchestrator(scene: _Scene, row: Row, chain: list[str]) -> Diagnosis:
    chain = [*chain, _line(scene, row)]
    waited = scene.since(row)
    facts = scene.details(row, "orchestrator") or {}
    blocked = innermost(main_stack(row))
    if not row.get("answer") or (blocked and "select" not in str(main_stack(row)[0][2])):
        busy = not row.get("answer") or waited > scene.patience_s
        culprit = f"{label(row, scene.rows)} on {row['host']} does not come back to its event loop"
        return scene.made(row, "orchestrator", culprit, where=blocked, seconds=waited, is_hang=busy, chain=chain)
    sick = _sick_engine(scene, facts)
    awaits = row["word"].get("awaits", "")
    if sick is not None and (awaits != "weights" or sick.kind == "engine"):
        sick.chain = [*chain, *sick.chain]
        sick.seconds = sick.seconds if sick.seconds is not None else waited
        return sick
    if awaits == "weights":
        return _awaiting_weights(scene, row, facts, chain)
    if facts.get("oldest"):
        return _in_episodes(scene, row, facts, chain)
    where = "" if awaits else next((innermost(s) for n, s in stacks_of(row) if n.startswith("asyncio_")), blocked)
    culprit = (
        f"{label(row, scene.rows)} on {row['host']} is at {phase(row['word'])}" if waited > scene.patience_s else ""
    )
    kind = "orchestrator" if culprit else "works"
    return scene.made(row, kind, culprit, where=where, seconds=waited, is_hang=bool(culprit), chain=chain)


def _sick_engine(scene: _Scene, facts: Mapping[str, Any]) -> Diagnosis | None:
    """Find a server that does not answer, that has requests and samples nothing, or whose engines stand in a call."""
    for row in scene.of(*ENGINE_ROLES):
        figures = scene.details(row, "figures")
        name = f"{label(row, scene.rows)} on {row['host']}"
        text, evidence = "", list[str]()
        if figures is None and not row.get("answer"):
            text, evidence = f"{name} does not answer", ["a call in C holds its interpreter"]
        elif figures and "error" in figures:
            text, evidence = f"{name} does not answer requests", [str(figures["error"])]
        elif figures and figures.get("running", 0) + figures.get("waiting", 0) > 0 and not figures["sampled_per_s"]:
            text = f"{name} has requests and samples nothing"
            evidence = [f"{figures['running']:.0f} running, {figures.get('waiting', 0):.0f} waiting, 0 tokens/s"]
        oldest = max((one["seconds"] for one in facts.get("oldest", [])), default=0.0)
        least_s = 0.0 if text else max(engines.LEAST_S, scene.patience_s)
        held = engines.find_held(engines.parts_of(row, scene.rows), now=scene.now, least_s=max(least_s, 0.1))
        if held is not None:
            return _in_engine(scene, held, text, evidence, oldest)
        if not text:
            continue
        where = next(
            (innermost(s) for name_, s in stacks_of(row) if "engine" in name_.lower()), innermost(main_stack(row))
        )
        return scene.made(
            row, "engine", text, where=where, seconds=oldest or None, evidence=evidence, advice=_ENGINES_ADVICE,
            is_hang=oldest > scene.patience_s or "error" in (figures or {"error": ""}),
        )  # fmt: skip
    urls = {row["word"].get("url") for row in scene.of(*ENGINE_ROLES)}
    absent = [s["url"] for s in facts.get("servers", []) if not s["ready"] and s["url"] not in urls]
    if not absent or not urls:  # all are there, or none of them is this run's own
        return None
    return Diagnosis(f"the server {absent[0]} has no process that serves", "gone", advice="see its log", is_hang=True)


def _in_engine(scene: _Scene, held: engines.Held, of_server: str, evidence: list[str], oldest: float) -> Diagnosis:
    """Name the engine core or worker that stands in a call; `of_server` is the complaint about its server, if any."""
    seconds = held.seconds if held.seconds is not None else oldest or None
    called = (held.row.get("call") or {}).get("name")
    text = f"{label(held.row, scene.rows)} on {held.row['host']} "
    text += f"does not come back from `{called}`" if called else "does not answer"
    return scene.made(
        held.row,
        "engine",
        text,
        where=held.where,
        seconds=seconds,
        is_hang=max(seconds or 0.0, oldest) > scene.patience_s,
        evidence=[*([of_server] if of_server else []), *evidence, *held.evidence],
        advice=_ENGINES_ADVICE,
    )


def _awaiting_weights(scene: _Scene, row: Row, facts: Mapping[str, Any], chain: list[str]) -> Diagnosis:
    """Tell whether the engines load a version, or the trainer has not made it."""
    waited = scene.since(row)
    loads = [server["url"] for server in facts.get("servers", []) if server["loads"]]
    trainer = scene.of("trainer")
    if loads or not trainer:
        culprit = (
            f"the servers {', '.join(loads)} load version {facts.get('wanted')}" if loads else "no trainer is there"
        )
        kind = "engine" if loads else "gone"
        return scene.made(row, kind, culprit, seconds=waited, is_hang=waited > scene.patience_s, chain=chain)
    found = _in_trainer(scene, trainer)
    found.chain = [*chain, *found.chain]
    return found


def _env_of(row: Row) -> str:
    """Return the environment that a process of episodes plays: its label is the name, and the process's number."""
    return str(row["word"].get("label", "")).rpartition("[")[0]


def _in_episodes(scene: _Scene, row: Row, facts: Mapping[str, Any], chain: list[str]) -> Diagnosis:
    """Tell, where the engines are well, whether the environment holds its episodes or they are simply long."""
    oldest = facts["oldest"][0]
    env, seconds = str(oldest["env"]), float(oldest["seconds"])
    chain = [*chain, f"{facts['running']} episodes run, the oldest ({env}, task {oldest['task']}) for {seconds:.0f} s"]
    figures_of = [scene.details(one, "figures") or {} for one in scene.of("inference")]
    at_work = sum(float(one.get("sampled_per_s", 0.0)) for one in figures_of)
    steps = sum(engines.works(engines.parts_of(one, scene.rows)) for one in scene.of("inference"))
    figures = [
        f"{label(one, scene.rows)}: {f.get('running', 0):.0f} requests run, {f.get('waiting', 0):.0f} wait, "
        f"{f.get('sampled_per_s', 0):.0f} tokens/s"
        for one, f in zip(scene.of("inference"), figures_of, strict=True)
        if f
    ]
    if at_work > 0 or steps > 0:
        rate = f"{at_work:.0f} tokens/s" if at_work > 0 else f"{steps} steps while they were looked at"
        culprit = f"the engines still sample for environment {env!r} ({rate})"
        found = scene.made(row, "works", culprit, seconds=seconds, is_hang=False, chain=chain, evidence=figures)
        found.advice = "nobody hangs: episodes are long, or the engines are too few"
        return found
    players = [row, *(one for one in scene.of("environment") if _env_of(one) == env)]
    where, task = busy_episode(players, env)
    idle = ["no engine has a request: the episodes are in their environment"] if figures_of else []
    within = [f"{task} stands in {where}"] if where else []
    return scene.made(
        row,
        "environment",
        f"environment {env!r}",
        where=where,
        seconds=seconds,
        is_hang=seconds > scene.patience_s,
        chain=chain,
        evidence=[*within, *idle, *figures],
        advice="see that line; every episode ends after env.timeout_s at the latest, and then counts as failed",
    )
