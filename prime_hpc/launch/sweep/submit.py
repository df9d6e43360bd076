"""`sweep submit` and `sweep resume`: what is missing or failed, prepared and sent; everything else is left alone."""

import sys
from collections.abc import Sequence

from prime_hpc.config.errors import ConfigError, Problem
from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.config.secret import OF_SITE, written_secrets
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import load_site, other_cluster
from prime_hpc.config.sources.files import dump_yaml
from prime_hpc.launch.submission import unseen_by_others, uses_slurm
from prime_hpc.launch.sweep.feed import Feed
from prime_hpc.launch.sweep.local_points import run_here
from prime_hpc.launch.sweep.prepare import Job, jobs_of, refuse_bad, write_run_dirs
from prime_hpc.launch.sweep.progress import RERUN, PointView, ask_strictly, look
from prime_hpc.launch.sweep.queue import plan_parts, resolve_pending_submits, send_parts
from prime_hpc.launch.sweep.report import BAD_POINTS, OK, SLURM_REFUSED, Report
from prime_hpc.launch.sweep.resolve import Base, Point, resolve_points
from prime_hpc.launch.sweep.results import unknown_metric
from prime_hpc.launch.sweep.state import POINTS, SWEEP_YAML, Sweep, merge_points, read_sweep, write_text
from prime_hpc.slurm.client import SlurmError
from prime_hpc.slurm.gpu_split import refuse_cpu_builds
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.slurm.script import restart_mode
from prime_hpc.slurm.submission_record import submitting


def submit_sweep(
    base: Base, *, states: Sequence[str] = RERUN, dry_run: bool = False, feed: Feed | None = None
) -> Report:
    """Bring a sweep nearer to its end.

    Args:
        feed: chooses those that fit now; None: all of them.

    Raises:
        ConfigError: every point is wrong in the same way, or the directory cannot be used.
        SlurmRefused: Slurm refuses, or cannot be asked; points of parts that were sent before stay sent.
    """
    points = resolve_points(base)
    _refuse_if_all_alike(points)
    _refuse_foreign(base)
    if dry_run:
        return _submit(base, points, states, dry_run=True, feed=feed)
    with submitting(base.sweep_dir):
        return _submit(base, points, states, dry_run=False, feed=feed)


def _stay_here(points: Sequence[Point]) -> None:
    """Raise where points are to go to another cluster of the site: a sweep's jobs are this one's."""
    slurms = [point.loaded.experiment.slurm for point in points if point.loaded is not None]
    stated = next((slurm.cluster for slurm in slurms if slurm.cluster), None)
    other = other_cluster(stated)
    if other is not None:
        where = f"slurm.cluster = {stated}" if stated else f"SLURM_CLUSTERS={other}"
        raise ConfigError(f"{where}: a sweep goes to the cluster where it is submitted; log in there", "slurm.cluster")


def _submit(base: Base, points: Sequence[Point], states: Sequence[str], *, dry_run: bool, feed: Feed | None) -> Report:
    sweep = read_sweep(base.sweep_dir)
    if not dry_run:
        resolve_pending_submits(sweep)
    pairs = merge_points(sweep, points)
    views = look(sweep, ask=ask_strictly)
    wanted = {view.row.index for view in views if view.state in (*states, "invalid")}
    jobs = jobs_of(sweep, pairs, wanted)
    first = next((point.loaded.experiment for point in points if point.loaded), None)  # of those that are valid
    by_slurm = first is not None and uses_slurm(first, asks=not dry_run)
    if by_slurm:
        _stay_here(points)
    site = load_site(first.slurm.site if first is not None else None)
    feed = feed if by_slurm else None
    jobs, findings = _sound(sweep, jobs, views, site, touch=not dry_run, feed=feed)
    report = Report(sweep, views, jobs, warnings=[*_warnings(sweep, points), *findings])
    report.code = BAD_POINTS if report.invalid else OK
    report.is_local = not by_slurm
    file = base.spec.file
    report.warnings += filter(None, [unknown_metric(file, first.kind) if first is not None else None])
    if report.is_local:
        _run_local(base, report, site, dry_run=dry_run)
        return report
    throttle, lanes = (file.throttle, file.lanes) if feed is None else (None, None)
    parts = plan_parts(sweep, jobs, views, site, throttle=throttle, lanes=lanes)
    report.parts = [part.as_dict() for part in parts]
    num_nodes = max((part.placement.num_nodes for part in parts), default=0)
    if (throttle or lanes) and any(restart_mode(p.experiment, site, p.placement) == "successor" for p in parts):
        report.warnings.append(
            "throttle and lanes hold until points come back as jobs of their own (slurm.restart.how: successor), which "
            "run beside them: --feed keeps to them"
        )
    report.warnings += filter(None, [unseen_by_others(sweep.dir, num_nodes, site.scratch)])
    if not dry_run:
        # without a container the jobs run in this very environment
        on_gpus = any(group.device == "cuda" for part in parts for group in part.placement.groups)
        refuse_cpu_builds(site.container is None and on_gpus)
        _write(base, sweep, jobs, site, is_local=False)
        report.parts = send_parts(sweep, parts, site)
        if any(part["error"] for part in report.parts):
            report.code = SLURM_REFUSED
    return report


def _sound(
    sweep: Sweep, jobs: list[Job], views: Sequence[PointView], site: SiteConfig, *, touch: bool, feed: Feed | None
) -> tuple[list[Job], list[str]]:
    """Return the points that are sent now and that nothing is wrong with, and the warnings about them.

    What is wrong is said of all points at the beginning; a feed's later rounds look at what they send alone.
    """
    try:
        if feed is None or feed.todo is None:
            jobs, findings = refuse_bad(sweep, jobs, site, touch=touch)
            if feed is not None:
                return feed.take(sweep, jobs, views, site), findings
            return jobs, [*findings, *_too_many(jobs, site)]
        return refuse_bad(sweep, feed.take(sweep, jobs, views, site), site, touch=touch)
    except SlurmError as error:
        raise SlurmRefused(Problem(f"how much room is in the queue cannot be asked. {error}", "launch")) from error


def _too_many(jobs: Sequence[Job], site: SiteConfig) -> list[str]:
    most = site.max_submit_jobs
    if most is None or len(jobs) <= most:
        return []
    return [
        f"{len(jobs)} points, and a user may have {most} jobs in the queue at once (max_submit_jobs of site profile "
        f"{site.name}): --feed sends them as slots come free"
    ]


def _run_local(base: Base, report: Report, site: SiteConfig, *, dry_run: bool) -> None:
    throttle = base.spec.file.throttle or 1
    report.parts = [{"kind": "local", "points": [job.row.index for job in report.jobs], "throttle": throttle}]
    if dry_run:
        return
    _write(base, report.sweep, report.jobs, site, is_local=True)
    if report.jobs:
        for warning in report.warnings:  # at the end, hours from now, they help nobody
            print(f"warning: {warning}", file=sys.stderr)
        invalid = f", {len(report.invalid)} are invalid" if report.invalid else ""
        print(
            f"without Slurm: {len(report.jobs)} points run here{invalid}, in the foreground, {throttle} at a time; "
            "Ctrl-C ends them, `sweep resume` goes on",
            file=sys.stderr,
            flush=True,
        )
        report.code = run_here(report.sweep, [job.row for job in report.jobs], throttle) or report.code


def _write(base: Base, sweep: Sweep, jobs: Sequence[Job], site: SiteConfig, *, is_local: bool) -> None:
    """Write the sweep's own files, then the run directories: a point's index is on disk before anything of it is."""
    try:
        with written_secrets(sweep.dir, base.secrets(), keep=OF_SITE):
            write_text(sweep.dir / SWEEP_YAML, dump_yaml(base.stored()))
    except OSError as error:
        raise ConfigError(f"{sweep.dir} cannot be written: {error.strerror}") from error
    sweep.write_points()
    (sweep.dir / "logs").mkdir(exist_ok=True)
    write_run_dirs(sweep, jobs, site, is_local=is_local)


def _refuse_if_all_alike(points: Sequence[Point]) -> None:
    """Refuse a mistake that every point has: it is the base's, not theirs, so nothing is sent, and it is said once.
    Raises ConfigError: with the mistake."""
    reasons = {point.reason for point in points}
    if None not in reasons and len(reasons) == 1:
        raise ConfigError(f"all {len(points)} points are wrong: {reasons.pop()}")


def _refuse_foreign(base: Base) -> None:
    if (base.sweep_dir / RUN_YAML).exists() and not (base.sweep_dir / POINTS).exists():
        raise ConfigError(f"{base.sweep_dir} holds a run: choose another name for the sweep", "name")


def _warnings(sweep: Sweep, points: Sequence[Point]) -> list[str]:
    found = list(dict.fromkeys(text for point in points if point.loaded for text in point.loaded.warnings))
    old = len(sweep.rows) - len(sweep.current)
    if old:
        found.append(
            f"{old} earlier points of {sweep.dir} are not in the sweep file (any more): they are left as they are"
        )
    return found
