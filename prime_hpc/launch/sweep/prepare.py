"""Run directories of points: checked, then written as `submit` writes those of single runs, thousands in seconds."""

import dataclasses
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from prime_hpc.config import ConfigError, Experiment, Loaded, write_snapshot
from prime_hpc.config.run_files import SITE_YAML, STOP
from prime_hpc.config.secret import secrets_of
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import write_site
from prime_hpc.config.snapshot import Shared, share
from prime_hpc.launch.checks import check, starts_elsewhere
from prime_hpc.launch.estimate.micro_batch import with_micro_batch
from prime_hpc.launch.for_slurm import is_for_slurm
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.prepare import for_evaluation
from prime_hpc.launch.resume import without_dependency
from prime_hpc.launch.sweep.resolve import Point
from prime_hpc.launch.sweep.state import PointRow, Sweep

_THREADS = 4


@dataclass(frozen=True)
class Job:
    """A point that is to run."""

    row: PointRow
    experiment: Experiment
    """As it goes into the run directory."""
    loaded: Loaded
    sent: Experiment
    """As its job is sent: of a point that has begun, without what that waited for."""


def jobs_of(sweep: Sweep, pairs: Sequence[tuple[PointRow, Point]], wanted: set[int]) -> list[Job]:
    """Return the wanted points that are valid, by index, with the experiments that their run directories get.
    `pairs`: of `merge_points`."""
    jobs = []
    for row, point in sorted(pairs, key=lambda pair: pair[0].index):
        if row.index in wanted and point.loaded is not None:
            changes = {"name": row.name, "output_dir": sweep.dir}
            experiment = point.loaded.experiment.model_copy(update=changes)
            loaded = dataclasses.replace(point.loaded, experiment=experiment)
            with suppress(ConfigError):  # versions that are not there: lint says so
                loaded = for_evaluation(loaded, waits=experiment.slurm.waits)
            jobs.append(Job(row, loaded.experiment, loaded, without_dependency(loaded.experiment, sweep.run_dir(row))))
    return jobs


def refuse_bad(sweep: Sweep, jobs: Sequence[Job], site: SiteConfig, *, touch: bool) -> tuple[list[Job], list[str]]:
    """Take out the points that could not run; the reason goes into the sweep's rows.

    Args:
        sweep: its rows are changed, not written.
        touch: also try whether the output directory can be written (makes it).

    Returns:
        the good ones, and lint's warnings about them, each once.
    """
    good: list[Job] = []
    warnings: Counter[str] = Counter()
    for job in jobs:
        findings = lint(job.experiment, site)
        reasons = _reasons(job.loaded, site) if touch else []
        reasons += [f"{f.key}: {f.message}; {f.remedy} ({f.code})" for f in findings if f.severity == "error"]
        if reasons:
            sweep.rows[job.row.index] = dataclasses.replace(job.row, reason="; ".join(dict.fromkeys(reasons)))
            continue
        good.append(job)
        warnings.update(f"{f.code} {f.key}: {f.message}; {f.remedy}" for f in findings if f.severity == "warning")
    told = [text if count == len(good) else f"{text} (of {count} of them)" for text, count in warnings.items()]
    return good, told


def _reasons(loaded: Loaded, site: SiteConfig) -> list[str]:
    try:
        by_slurm, elsewhere = is_for_slurm(loaded.experiment, site), starts_elsewhere(loaded.experiment, site)
        waits = by_slurm and loaded.experiment.slurm.waits
        check(loaded, by_slurm=by_slurm, starts_elsewhere=elsewhere, waits=waits)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def write_run_dirs(sweep: Sweep, jobs: Sequence[Job], site: SiteConfig, *, is_local: bool) -> None:
    """Write `run.yaml`, `lock.json`, `configs/` and `site.yaml` of every point.
    Raises ConfigError: the disk is full or not writable."""
    if not jobs:
        return
    try:
        shared = share(sys.argv, sweep.dir)
        write_site(site, sweep.dir)
        where = None if is_local else site
        jobs = [dataclasses.replace(job, experiment=with_micro_batch(job.experiment, where)[0]) for job in jobs]
        _write(sweep, jobs[0], shared, site)  # alone: it fills what is shared
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda job: _write(sweep, job, shared, site), jobs[1:]))
    except OSError as error:
        raise ConfigError(f"{sweep.dir} cannot be written: {error.strerror} ({error.filename})") from error


def _write(sweep: Sweep, job: Job, shared: Shared, site: SiteConfig) -> None:
    site_secrets = any(True for _ in secrets_of(site))
    run_dir = sweep.run_dir(job.row)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / STOP).unlink(missing_ok=True)  # from after the point's last end
    if site_secrets:
        write_site(site, run_dir)
    else:
        shutil.copyfile(sweep.dir / SITE_YAML, run_dir / SITE_YAML)
    write_snapshot(job.experiment, run_dir, [], shared)
