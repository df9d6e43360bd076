"""Preflight's conclusions from what the nodes wrote and saw: pure functions of times and names.

How clocks and lateness are told apart. Nobody's clock is trusted but the supervisor's. Let `offset(h)` be the clock of
host h minus the supervisor's. Whenever r saw at `seen` (r's clock) what w had written at `wrote` (w's clock), the one
came after the other, hence

    offset(r) - offset(w) <= seen - wrote

Such sightings are: files of peers, the supervisor's own file, the start of a process after its launch, and a line that
came through the step's standard output. Together they bound every offset from both sides, often to milliseconds, and
however late a file was, the bounds stay true. A clock is called wrong only if its whole interval is.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SUPERVISOR = ""
"""Name of the supervisor among the hosts."""
ALL_PEERS = 16
"""Up to so many nodes everybody watches everybody."""
MAX_ROUNDS = 8

Bounds = tuple[float, float]
"""Least and greatest clock offset to the supervisor, in seconds."""


@dataclass(frozen=True)
class Sighting:
    """`reader` saw at `seen` (its clock) what `writer` had written at `wrote` (the writer's clock). Epoch seconds."""

    writer: str
    reader: str
    wrote: float
    seen: float
    looking: float = -math.inf
    """When the reader began to look (its clock): what was written earlier is late from then on only."""


def peers_of(index: int, count: int) -> list[int]:
    """Whom node `index` of `count` watches; symmetric, so that every pair is measured in both directions.

    All others up to 16 nodes; beyond, those at ring distances 1, 2, 4, ...: about 2 log2(count).
    """
    if count <= ALL_PEERS:
        return [i for i in range(count) if i != index]
    steps = [1 << k for k in range(count.bit_length()) if 1 << k <= count // 2]
    return sorted({(index + sign * step) % count for step in steps for sign in (1, -1)} - {index})


def clock_bounds(
    sightings: Iterable[Sighting], hosts: Iterable[str], same_clock: Iterable[str] = ()
) -> dict[str, Bounds]:
    """Least and greatest offset of every host's clock to the supervisor's; infinite where nothing is known.

    Args:
        hosts: without the supervisor.
        same_clock: hosts that are the supervisor's own machine.
    """
    names = list(hosts)
    low, high = dict.fromkeys(names, -math.inf), dict.fromkeys(names, math.inf)
    for host in (SUPERVISOR, *same_clock):
        low[host] = high[host] = 0.0
    known = [s for s in sightings if s.writer in low and s.reader in low]
    for _ in range(MAX_ROUNDS):
        changed = False
        for s in known:
            gap = s.seen - s.wrote
            if s.reader != SUPERVISOR and high[s.writer] + gap < high[s.reader]:
                high[s.reader], changed = high[s.writer] + gap, True
            if s.writer != SUPERVISOR and low[s.reader] - gap > low[s.writer]:
                low[s.writer], changed = low[s.reader] - gap, True
        if not changed:
            break
    return {host: (low[host], high[host]) for host in low if host != SUPERVISOR}


def clock_problem(bounds: Bounds, limit_s: float) -> str | None:
    """Describe what is wrong with a clock; None where it may be right."""
    low, high = bounds
    if low > limit_s:
        return f"its clock is at least {low:.1f} s ahead of the supervisor's (limit {limit_s:g} s): check NTP"
    if high < -limit_s:
        return f"its clock is at least {-high:.1f} s behind the supervisor's (limit {limit_s:g} s): check NTP"
    return None


def best_guess(bounds: Bounds) -> float | None:
    """Return the offset nearest to 0 that the bounds allow: a clock is believed as far as it can be; None if
    unbounded."""
    low, high = bounds
    return None if math.isinf(low) or math.isinf(high) else min(max(0.0, low), high)


def lateness(sighting: Sighting, bounds: Mapping[str, Bounds]) -> tuple[float, float]:
    """How late a file became visible: (at least, about), in seconds; 0 where it was there before the reader looked.

    The first is what the clocks' bounds prove. It includes the writer's own fsync and rename.
    """
    known = {**bounds, SUPERVISOR: (0.0, 0.0)}
    writer, reader = known[sighting.writer], known[sighting.reader]
    waited = sighting.seen - sighting.looking
    proven = min(sighting.seen - sighting.wrote - (reader[1] - writer[0]), waited)
    guess_w, guess_r = best_guess(writer), best_guess(reader)
    if guess_w is None or guess_r is None:
        return max(proven, 0.0), max(proven, 0.0)
    about = min(sighting.seen - sighting.wrote - (guess_r - guess_w), waited)
    return max(proven, 0.0), max(about, 0.0)


def judge_unseen(unseen: Mapping[str, Iterable[str]], watchers: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Problems by host from "reader never saw writer": the side that fails with several is at fault.

    Args:
        unseen: by reader (the supervisor too), the writers that it waited for in vain. Writers that never wrote
            do not belong here: their silence is their own problem.
        watchers: by writer, the readers that waited for it and had an answer.

    Returns:
        sentences by host. Every missing sight is charged to one side at least.
    """
    missed = {(reader, writer) for reader, writers in unseen.items() for writer in writers}
    blind = {writer: [r for r in readers if (r, writer) in missed] for writer, readers in watchers.items()}
    hidden = {
        writer
        for writer, readers in watchers.items()
        if blind[writer] and ((SUPERVISOR, writer) in missed or 2 * len(blind[writer]) > len(list(readers)))
    }
    problems: dict[str, list[str]] = {}
    for writer in sorted(hidden):
        by = ", ".join(reader or "the supervisor" for reader in sorted(blind[writer])[:4])
        more = f" and {len(blind[writer]) - 4} more" if len(blind[writer]) > 4 else ""
        problems.setdefault(writer, []).append(
            f"its file was not seen by {by}{more}: does it mount the run directory's file system?"
        )
    left: dict[str, list[str]] = {}
    for reader, writer in sorted(missed):
        if writer not in hidden:
            left.setdefault(reader, []).append(writer)
    for reader, writers in left.items():
        if reader != SUPERVISOR:
            names = ", ".join(writers[:4]) + (f" and {len(writers) - 4} more" if len(writers) > 4 else "")
            problems.setdefault(reader, []).append(
                f"it did not see the files of {names}, which others saw: its view of the file system is stale"
            )
    return problems


def few_gpus(seen: Mapping[str, int], asked: Mapping[str, int | None], component: Mapping[str, int]) -> dict[str, str]:
    """Sentences by host that sees fewer GPUs than asked, or (asked None) than most of its component's hosts see."""
    problems = {}
    for host, count in seen.items():
        wanted = asked[host]
        if wanted is not None:
            if count < wanted:
                problems[host] = f"it sees {count} of the {wanted} GPUs that were asked for"
            continue
        fellows = [seen[other] for other in seen if component[other] == component[host]]
        usual = max(set(fellows), key=lambda n: (fellows.count(n), n))
        if count < usual:
            problems[host] = f"it sees {count} GPUs, most of its fellows see {usual}"
    return problems


def stuck(phases: Mapping[str, int], silent: Iterable[str], hosts: Iterable[str]) -> list[str]:
    """Find the hosts that held up a collective that did not end.

    Those behind all others, and those whose process gives no sign of life; [] where nobody stands out.

    Args:
        phases: how far each host came; hosts that never spoke are absent.
        silent: hosts without a recent sign of life.
    """
    hosts = list(hosts)
    mute = [host for host in hosts if host not in phases]
    named = set(mute) | set(silent)
    far = max(phases.values(), default=0)
    behind = {host for host in hosts if phases.get(host, -1) < far}
    # where most are behind it is not they who hold up the rest
    if 2 * len(behind) <= len(hosts):
        named |= behind
    return [host for host in hosts if host in named]
