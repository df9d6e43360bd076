"""`prime-hpc sweep submit|status|results|cancel|resume SWEEP`: many experiments from one file.

SWEEP is the sweep file, its directory `<output_dir>/<name>`, or its name under the outputs folder.

Exit codes: 0 done; 1 a point is invalid or (without Slurm) failed, the others were run; 2 wrong usage or file;
3 Slurm refused, or cannot be reached; 130 interrupted. With --feed it returns when the last point is sent.
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.cli.common import Given, parse, print_json, say
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.sweep.find import find_file, find_sweep
from prime_hpc.launch.sweep.progress import RERUN, RESUME, PointView, counted, look
from prime_hpc.launch.sweep.resolve import Base, load_base, load_stored
from prime_hpc.launch.sweep.results import Metric, Result, choose_metric, collect_results, over_seeds
from prime_hpc.launch.sweep.state import read_sweep
from prime_hpc.observe.table import align

if TYPE_CHECKING:
    from prime_hpc.launch.sweep.report import Report

TIMEOUT_S = 600.0
"""Wait for the saves of a cancel."""
SHOWN = 200
"""Lines of a table for people, unless --all is given."""
NAMED = 6
"""Points of one fault that are named."""


def run(argv: list[str], program: str) -> int:
    """Do what the first argument says."""
    usage = parse("sweep", []).usage
    actions = {"submit": _submit, "status": _status, "results": _results, "cancel": _cancel, "resume": _resume}
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"what is to be done? usage: {usage}")
    if argv[0] not in actions:
        near = get_close_matches(argv[0], actions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"usage: {usage}"
        if Path(argv[0]).is_file():
            hint = f"did you mean sweep submit {argv[0]}?"
        raise ConfigError(f"sweep knows no {argv[0]!r}; {hint}")
    return actions[argv[0]](argv[1:], f"{program} {argv[0]}")


def _submit(argv: list[str], program: str) -> int:
    given = parse("sweep", argv, "submit")
    word, flags = _sweep_word(given)
    file = find_file(word)
    if file is not None:
        base = load_base(file, flags)
    else:
        if flags:
            raise ConfigError(f"{word} is a sweep as it was submitted: to change keys ({flags[0]}) submit its file")
        base = load_stored(find_sweep(word) / "sweep.yaml", enter=True)
    return _send(base, RERUN, given, program)


def _resume(argv: list[str], program: str) -> int:
    given = parse("sweep", argv, "resume")
    word, flags = _sweep_word(given)
    base = load_stored(find_sweep(word, flags) / "sweep.yaml", enter=True)
    return _send(base, RESUME, given, program)


def _send(base: Base, states: Sequence[str], given: Given, program: str) -> int:
    """Send the points in these states: all at once, or as slots come free."""
    from prime_hpc.launch.sweep.feed_sweep import EVERY_S, feed_sweep
    from prime_hpc.launch.sweep.submit import submit_sweep

    every_s, dry_run = given.positive("--every"), "--dry-run" in given
    if "--feed" not in given:
        if every_s is not None:
            raise ConfigError("--every belongs to --feed")
        return _print_report(submit_sweep(base, states=states, dry_run=dry_run), given, program)

    report = feed_sweep(
        base, states=states, every_s=every_s or EVERY_S, say=lambda text: say(f"{program}: {text}"), dry_run=dry_run
    )
    return _print_report(report, given, program)


def _status(argv: list[str], program: str) -> int:
    given = parse("sweep", argv, "status")
    sweep_dir = _find(given)
    sweep = read_sweep(sweep_dir)
    views = look(sweep)
    if "--json" in given:
        print_json({"sweep": str(sweep_dir), "points": [view.as_dict() for view in views]})
        return 0
    print(f"sweep {sweep_dir.name} ({sweep_dir}): {_points(len(views))}, {counted(views)}")
    rows = [(*_cells(view), view.note.partition("\n")[0]) for view in views]
    _table(("POINT", "STATE", "STEP", "REWARD/LOSS", "ATT", "JOB", "NOTE"), rows, "--all" in given)
    return 0


def _cells(view: PointView) -> tuple[str, ...]:
    status = view.status
    value = "-" if status.value is None else f"{status.value:.4g}{' loss' if status.figure == 'loss' else ''}"
    return (
        view.row.name,
        view.state,
        status.progress,
        value,
        "-" if status.attempt is None else str(status.attempt),
        status.job_id or "-",
    )


def _results(argv: list[str], program: str) -> int:
    from prime_hpc.launch.sweep.plot import draw

    given = parse("sweep", argv, "results")
    sweep_dir, plot = _find(given), given.path("--plot")
    sweep, base = read_sweep(sweep_dir), load_stored(sweep_dir / "sweep.yaml")
    metric = choose_metric(base.spec.file, str(base.variants.stated.get("kind", "rl")), given.get("--metric"))
    results = collect_results(sweep, look(sweep), metric, whole=plot is not None)
    seeds = over_seeds(results, metric.goal)
    if plot is not None:
        draw(results, metric, f"{sweep_dir.name}: {metric.name}", plot)
    if "--json" in given:
        print_json(
            {
                "sweep": str(sweep_dir),
                "metric": {"name": metric.name, "goal": metric.goal, "value": metric.describe()},
                "results": [result.as_dict() for result in results],
                "over_seeds": [vars(group) for group in seeds],
            }
        )
        return 0
    _print_results(sweep_dir, metric, results, "--all" in given)
    if seeds:
        print("\nmean over seeds")
        rows = [(_values_text(g.values), f"{g.mean:.5g}", f"{g.std:.3g}", str(g.num_seeds)) for g in seeds]
        _table(("VALUES", "MEAN", "STD", "SEEDS"), rows, "--all" in given)
    if plot is not None:
        print(f"\nplot: {plot}")
    return 0


def _print_results(sweep_dir: Path, metric: Metric, results: list[Result], everything: bool) -> None:
    print(f"sweep {sweep_dir.name}: {metric.describe()}")
    rows = []
    for rank, result in enumerate(results, 1):
        row = result.view.row
        value = "-" if result.value is None else f"{result.value:.5g}"
        steps = "-" if result.step is None else str(result.step)
        place = str(rank) if result.is_ranked and result.value is not None else "-"
        rows.append((place, row.name, value, steps, result.view.state, _values_text(row.values)))
    _table(("", "POINT", metric.name.upper(), "STEP", "STATE", "VALUES"), rows, everything)
    if early := sum(result.value is not None and not result.is_ranked for result in results):
        print(f"\n-: {early} not completed: what they show is of the step that they came to")


def _values_text(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items()) or "-"


def _cancel(argv: list[str], program: str) -> int:
    from prime_hpc.launch.sweep.cancel import cancel_sweep

    given = parse("sweep", argv, "cancel")
    timeout_s = given.positive("--timeout") or TIMEOUT_S
    sweep = read_sweep(_find(given))
    outcome = cancel_sweep(sweep, save="--now" not in given, timeout_s=timeout_s, say=say)
    given.tell(outcome.as_dict, outcome.describe)
    return 0 if outcome.is_done else 1


def _sweep_word(given: Given) -> tuple[str, list[str]]:
    """SWEEP and the flags around it: the first word that is no flag and no flag's value."""
    if not given.words or given.words[0].startswith("-"):
        raise ConfigError(f"name the sweep right after the verb; usage: {given.usage}")
    return given.words[0], given.words[1:]


def _find(given: Given) -> Path:
    word, flags = _sweep_word(given)
    others, tokens = [word], iter(flags)
    for token in tokens:
        name, equals, _ = token.partition("=")
        if name.replace("_", "-") not in ("--output-dir", "--name"):
            others.append(token)
        elif not equals:
            next(tokens, None)  # its value
    replace(given, words=others).arguments(1)
    return find_sweep(word, flags)


# --- for people -------------------------------------------------------------------------------------------------


def _print_report(report: "Report", given: Given, program: str) -> int:
    """Print what a submit did."""
    dry = "--dry-run" in given
    if dry or not (report.is_local and report.jobs):  # else it was said before they ran
        for warning in report.warnings:
            print(f"{program}: warning: {warning}", file=sys.stderr)
    if "--json" in given:
        print_json(report.as_dict())
        return report.code
    if report.code == 130:
        return report.code  # how many were to run is no news of what was interrupted
    left = f"; left alone: {counted(report.left)}" if report.left else ""
    done = "would be sent" if dry else "run" if report.is_local else "sent"
    accepted = sum(len(part["points"]) for part in report.parts if not part.get("error"))
    print(f"sweep {report.sweep.dir}: {_points(len(report.sweep.current))}, {accepted} {done}{left}")
    for part in report.parts if not report.is_local else []:
        print(f"  {_part_text(part)}")
    if dry:
        rows = [(str(job.row.index), job.row.name, _values_text(job.row.values)) for job in report.jobs]
        _table(("INDEX", "POINT", "VALUES"), rows, everything=False)
    _print_invalid(report, program)
    stopped = sum(view.state == "stopped" for view in report.left)
    if stopped and not dry:
        resume = f"prime-hpc sweep resume {shlex.quote(str(report.sweep.dir))}"
        print(f"  {stopped} stopped: `{resume}` goes on with what was stopped")
    return report.code


def _print_invalid(report: "Report", program: str) -> None:
    """Print the points that cannot run, those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for row in report.invalid:
        # reasons name the run directory: that is no difference
        by_reason.setdefault(str(row.reason).replace(f"/{row.name}", ""), []).append(row.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        one = "point" if len(names) == 1 else "points"
        print(f"{program}: invalid {one} {', '.join(names[:NAMED])}{more}: {reason}", file=sys.stderr)


def _points(number: int) -> str:
    return f"{number} point{'' if number == 1 else 's'}"


def _part_text(part: dict[str, Any]) -> str:
    """One array or job, for people."""
    after = f", after job {', '.join(part['after'])}" if part["after"] else ""
    if part["kind"] == "array":
        rate = f", {part['throttle']} at a time" if part["throttle"] else ""
        text = f"{_points(len(part['points']))} ({part['array']}){rate}{after}"
    else:
        text = f"{part['names'][0]} ({part['layout']}, lane {part['lane']}){after}"
    if part.get("error"):
        return f"{part['kind']} refused: {text}: {part['error']}"
    return f"{part['kind']} {part['job_id']}: {text}" if part.get("job_id") else f"{part['kind']}: {text}"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], everything: bool) -> None:
    shown = rows if everything else rows[:SHOWN]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    for line in align([header, *shown]):
        print(line[:room].rstrip())
    if len(shown) < len(rows):
        print(f"and {len(rows) - len(shown)} more (--all)")
