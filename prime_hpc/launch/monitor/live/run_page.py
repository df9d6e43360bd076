"""One run as a page of a terminal: progress, what a step consists of, curves, roles, servers, attempts, room left."""

import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prime_hpc.launch.monitor.live import parts
from prime_hpc.launch.monitor.live.facts import ORCHESTRATOR_PHASES, RECENT, TRAINER_PHASES, LiveRun, series, shares
from prime_hpc.launch.monitor.run_facts import RunStatus, number, span
from prime_hpc.observe.console import local_time, short, time_left
from prime_hpc.slurm.hostlist import compress_hosts
from prime_hpc.store.io.disk import size_text

RL_CURVES = (
    ("reward", "sampled", "reward/mean"),
    ("loss", "trained", "loss"),
    ("KL", "trained", "kl"),
    ("entropy", "trained", "entropy"),
    ("length", "sampled", "completion/tokens_mean"),
    ("lag", "sampled", "lag/mean"),
    ("train t/s", "trained", "tokens_per_s_overall"),
    ("gen. t/s", "sampled", "tokens/sampled_per_second"),
)
"""Name, whose rows, metric."""
SFT_CURVES = (
    ("loss", "trained", "loss"),
    ("eval loss", "trained", "eval/loss"),
    ("accuracy", "trained", "rewards/accuracies"),
    ("margin", "trained", "rewards/margins"),
    ("grad norm", "trained", "grad_norm"),
    ("lr", "trained", "lr"),
    ("tokens/s", "trained", "tokens_per_s"),
    ("MFU", "trained", "mfu"),
)
MOST_ATTEMPTS = 4
MOST_SERVERS = 12
"""Of more, the busiest are shown."""
_NARROW = 72


def run_page(live: LiveRun, width: int, *, ascii_only: bool = False) -> RenderableType:
    """Return the page; lines that a run does not fill are left out."""
    status = live.status
    found: list[RenderableType] = [_head(status, width, ascii_only=ascii_only)]
    found.append(parts.lines(list(_about(live))))
    found += [parts.lines(rows) for rows in (list(_steps(live, width, ascii_only)),) if rows]
    curves = _curves(live, width, ascii_only)
    found += [Text(), curves] if curves is not None else []
    found += [Text(), _roles(status)] if status.roles else []
    found += [Text(), _servers(status)] if status.servers else []
    found += [Text(), parts.lines(list(_below(live)))]
    return Group(*found)


def _head(status: RunStatus, width: int, *, ascii_only: bool) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis").append(parts.clean(status.name), "bold")
    text.append("  ").append_text(parts.state(status.state))
    if status.step is None and status.max_steps is None:
        return text
    text.append(f"  step {status.progress}  ", "")
    if status.max_steps:
        done = (status.step or 0) / status.max_steps
        room = min(40, width - len(text.plain) - 7)
        if room >= 8:
            text.append_text(parts.bar(done, room, ascii_only=ascii_only))
        text.append(f" {parts.percent(done)}")
    return text


def _about(live: LiveRun) -> Iterator[tuple[str, Text | str]]:
    status = live.status
    if status.note or status.starts is not None:
        starts = f"starts about {local_time(status.starts)}" if status.starts is not None else ""
        yield "note", "; ".join(filter(None, [status.note, starts]))
    attempt = [f"job {status.job_id}"] if status.job_id else []
    attempt += [f"Slurm says {status.slurm}"] if status.slurm else []
    attempt += [status.attempt_text] if status.attempt is not None else []
    attempt += [f"since {local_time(status.since)}"] if status.since is not None else []
    yield "attempt", ", ".join(attempt) or "none yet"
    left = [f"about {time_left(status.eta_s)} to the last step"] if status.eta_s is not None else []
    if status.time_left_s is not None:
        text = f"{time_left(status.time_left_s)} of the job's walltime left"
        left.append(text + (": not enough" if status.eta_s is not None and status.eta_s > status.time_left_s else ""))
    if left:
        yield "time", ", ".join(left)
    if status.stall:
        yield "stall", Text(parts.clean(status.stall), "bold red")
    if status.no_successor:
        yield "succ.", Text(parts.clean(f"no successor waits: {status.no_successor}"), "bold yellow")
    for index, text in enumerate(status.alarms):
        yield "alarms" if index == 0 else "", Text(parts.clean(text), "bold yellow")


def _steps(live: LiveRun, width: int, ascii_only: bool) -> Iterator[tuple[str, Text | str]]:
    """Yield what a step consists of, for each side, and who waits for whom."""
    room = max(10, min(60, width - parts.LABEL_WIDTH - 2))
    trained = shares(live.trained, TRAINER_PHASES, "rest")
    sampled = shares(live.sampled, ORCHESTRATOR_PHASES, "work")
    for label, found in (("trainer", trained), ("orchestr.", sampled)):
        if found is None:
            continue
        seconds, split = found
        yield label, f"{parts.number(seconds)} s/step: {parts.legend(split, ascii_only=ascii_only)}"
        yield "", Text(parts.stacked(split, room, ascii_only=ascii_only))
    idle = [f"trainer {parts.percent(trained[1]['wait'])}"] if trained and live.kind == "rl" else []
    for label, key in (("engines", "queue/idle_share"), ("empty seats", "queue/empty_seats")):
        values = [value for value in series(live.sampled[-RECENT:], key) if value == value]
        idle += [f"{label} {parts.percent(sum(values) / len(values))}"] if values else []
    if idle:
        yield "idle", f"{', '.join(idle)} of the last {min(RECENT, max(len(live.trained), len(live.sampled)))} steps"
    if live.episodes:
        yield "episodes", _episodes(live)


def _episodes(live: LiveRun) -> str:
    row = live.episodes[-1]
    words = [f"{row.get('version', '')}: {row['step']}/{row.get('total', '?')}"]
    for key, value in row.items():
        if key.startswith("reward/") and (mean := number(value)) is not None:
            words.append(f"{key.removeprefix('reward/')} {parts.number(mean)}")
    speed, left = number(row.get("episodes_per_s")), number(row.get("eta_s"))
    words += [f"{parts.number(speed)} episodes/s"] if speed is not None else []
    words += [f"about {time_left(left)} left"] if left is not None and live.status.is_under_way else []
    return ", ".join(words)


def _curves(live: LiveRun, width: int, ascii_only: bool) -> Table | None:
    columns = 2 if width >= _NARROW else 1
    room = (width - 3) // columns if columns == 2 else width - 1
    rows = {"trained": live.trained, "sampled": live.sampled}
    found = [(name, series(rows[whose], key)) for name, whose, key in (SFT_CURVES if live.kind == "sft" else RL_CURVES)]
    drawn = [parts.curve(name, values, room, ascii_only=ascii_only) for name, values in found if values]
    if not drawn:
        return None
    grid = Table.grid(padding=(0, 2))
    for _ in range(columns):
        grid.add_column(no_wrap=True, width=room)
    for index in range(0, len(drawn), columns):
        grid.add_row(*drawn[index : index + columns])
    return grid


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def _roles(status: RunStatus) -> Table:
    """Return each role's state, hosts, and what its processes do now."""
    table = _table("role", "state", "hosts", "now")
    table.columns[3].no_wrap, table.columns[3].overflow = False, "fold"
    shown = [label for label in status.roles if label not in status.servers]
    for label in shown:
        hosts = compress_hosts(status.nodes.get(label, []))
        table.add_row(parts.clean(label), parts.state(status.roles[label]), _cut(hosts, 20), _now(status, label))
    for name, what in status.runs.items():
        table.add_row(parts.clean(name), Text(parts.clean(what)), "", "")
    return table


def _now(status: RunStatus, label: str) -> str:
    words = []
    for row in status.doing.get(label, [])[:3]:
        text = parts.clean(row.get("phase", "?"))
        text += f", waits for {parts.clean(row['awaits'])}" if row.get("awaits") else ""
        since, count = number(row.get("since")), number(row.get("count"))
        text += f" for {span(max(0.0, time.time() - since))}" if since is not None and row.get("awaits") else ""
        text += f"; {parts.clean(row['blocked'])}" if row.get("blocked") else ""
        words.append(text + (f" ({count:.0f} processes)" if count is not None and count > 1 else ""))
    return "; ".join(words)


def _servers(status: RunStatus) -> Table:
    """Return how busy each server is."""
    table = _table("server", "state", ">running", ">queued", ">KV cache", ">tokens/s", "")

    def busy(label: str) -> float:
        return number(status.servers[label].get("running")) or 0.0

    labels = list(status.servers)
    if len(labels) > MOST_SERVERS:
        labels = sorted(labels, key=busy, reverse=True)[:MOST_SERVERS]
    for label in labels:
        load = status.servers[label]
        found = {key: number(load.get(key)) for key in ("running", "waiting", "kv_use", "sampled_per_s")}
        cells = [
            "-" if found["running"] is None else f"{found['running']:.0f}",
            "-" if found["waiting"] is None else f"{found['waiting']:.0f}",
            "-" if found["kv_use"] is None else parts.percent(found["kv_use"]),
            "-" if found["sampled_per_s"] is None else short(found["sampled_per_s"]),
        ]
        trouble = Text(_cut(parts.clean(load.get("error", "")), 60), "red")
        table.add_row(parts.clean(label), parts.state(status.roles.get(label, "?")), *cells, trouble)
    left = len(status.servers) - len(labels)
    if left:
        table.add_row(f"and {left} more", "", "", "", "", "", "")
    return table


def _below(live: LiveRun) -> Iterator[tuple[str, Text | str]]:
    status = live.status
    if status.checkpoint is not None:
        made = number(status.checkpoint_time)
        saved = f", saved {span(max(0.0, time.time() - made))} ago" if made is not None else ""
        yield "checkpoint", f"step {status.checkpoint}{saved}"
    ended = [row for row in live.attempts if number(row.get("ended")) is not None]
    for index, row in enumerate(reversed(ended[-MOST_ATTEMPTS:])):
        began = local_time(number(row.get("began")) or 0.0)
        text = f"{row['attempt']}: {began} to {local_time(number(row.get('ended')) or 0.0)}, {row.get('outcome')}"
        yield "ended" if index == 0 else "", f"{text}: {row.get('cause') or 'no cause was written'}"
    if live.space is not None and live.space[1] > 0:
        free, whole = live.space
        share = free / whole
        yield (
            "disk",
            Text(f"{size_text(free)} free of {size_text(whole)} ({share:.0%})", "red" if share < 0.03 else ""),
        )
    yield "directory", status.path


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
