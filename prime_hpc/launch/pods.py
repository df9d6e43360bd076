"""Entry point of the supervisor's pod: `python -m prime_hpc.launch.pods EXPERIMENT_FILE`.

Prepares the run directory on the shared volume, waits for the run's other pods, and supervises an attempt. A pod that
Kubernetes makes again goes on with the same run.

Exit codes: as `prime_hpc.supervisor.main`; 75: another attempt follows, 74: the volume cannot be read; after these two
the Job makes the pod again.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from loguru import logger

from prime_hpc.config import ConfigError, load_experiment
from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.config.site import write_site
from prime_hpc.kubernetes.connection import connect, messages, read_key, say
from prime_hpc.kubernetes.manifests import FINAL_CODES
from prime_hpc.kubernetes.placement import PODS, SITE, for_pods, read_nodes, section_of
from prime_hpc.launch.prepare import prepare_run
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.store.errors import StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.io.retry_reads import Patience, as_unreadable
from prime_hpc.supervisor.attempt.early_end import EXIT_UNREADABLE, LOAD_S
from prime_hpc.supervisor.attempt.restart_policy import EXIT_AGAIN

COMES_BACK = (EXIT_UNREADABLE, EXIT_AGAIN)
"""Exit codes after which the Job makes the pod again."""
POLL_S = 1.0
SAY_EVERY_S = 30.0
OVER_S = 20.0
ANSWER_S = 5.0
"""So long a pod that was reached may take to answer."""
RENDERED = "pods.yaml"
"""In the run directory: the experiment as the pods got it."""


def run_in_pods(file: Path) -> int:
    """Run one attempt and, where none follows, tell the other pods; returns the exit code.
    Raises ConfigError: this is no pod of a run."""
    key, nodes = read_key(), read_nodes()
    if nodes is None or PODS not in os.environ:
        raise ConfigError(f"{PODS} is not set: this runs in a pod of `prime-hpc render --target kubernetes`")
    code = 1  # also of an error that nobody thought of, after which the others' GPUs must not wait either
    try:
        code = _attempt(file, nodes, key)
        if code not in (0, *COMES_BACK, *FINAL_CODES):
            code = 1  # told to end by a signal, and it does not come back: Kubernetes would make the pod again
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except (StoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_UNREADABLE if as_unreadable(error) else 1
    finally:
        if code not in COMES_BACK:
            _say_over([host for host in nodes.all_hosts if host != nodes.batch_host], key)
    return code


def _attempt(file: Path, nodes: Allocation, key: str) -> int:
    """Run one attempt; returns its exit code.

    Raises:
        ConfigError: the experiment is wrong, or pods are missing.
        StoreError, OSError: the run directory cannot be read or written.
    """
    loaded = load_experiment([str(file)], "submit", is_begun=True)  # whoever rendered it has checked it
    loaded = replace(loaded, experiment=for_pods(loaded.experiment))
    section = section_of(loaded.experiment)
    run_dir = loaded.experiment.run_dir.resolve()
    text = file.read_text(encoding="utf-8")
    if not _is_same(run_dir, text):
        prepare_run(loaded, SITE)
        write_site(SITE, run_dir)
        write_atomic(run_dir / RENDERED, text)
    own = subprocess.Popen([sys.executable, "-P", "-m", "prime_hpc.kubernetes.pod"])
    try:
        _await_pods(list(dict.fromkeys([nodes.batch_host, *nodes.all_hosts])), key, section.pods_timeout_s)
        from prime_hpc.supervisor.main import supervise

        return supervise(run_dir, in_job=True)
    finally:
        own.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            own.wait(timeout=15)
        own.kill()


def _is_same(run_dir: Path, text: str) -> bool:
    """Return whether the run directory was made by this very rendering: then its pod was only made again.

    A directory that was is never taken for another one because it cannot be read: it would be made anew, and with
    `clean` deleted before.
    Raises Unreadable: that cannot be told until the deadline.
    """

    def look() -> bool:
        if not {RUN_YAML, RENDERED} <= set(files.list_dir(run_dir)):
            return False
        try:
            rendered = (run_dir / RENDERED).read_text(encoding="utf-8")
        except FileNotFoundError as error:  # it is listed: one of the two is an older state
            raise Unreadable.of(error) from error
        except UnicodeDecodeError as error:
            raise Unreadable(run_dir / RENDERED, f"it is no text ({error.reason} at byte {error.start})") from error
        if not rendered:
            raise Unreadable(run_dir / RENDERED, "it is empty")
        return rendered == text

    return Patience(LOAD_S)(look)


def _await_pods(hosts: list[str], key: str, timeout_s: float) -> None:
    """Return once all pods answer. Raises ConfigError: some do not within `timeout_s`."""
    began = said = time.monotonic()
    missing = dict.fromkeys(hosts, "")
    while missing:
        answers = _ask_all(list(missing), key, "hello", "ready")
        missing = {host: why for host, why in answers.items() if why is not None}
        now = time.monotonic()
        words = "; ".join(f"{host} ({why})" for host, why in missing.items())
        if missing and now - began > timeout_s:
            raise ConfigError(f"pods did not come within kubernetes.pods_timeout_s = {timeout_s:.0f} s: {words}")
        if missing and now - said > SAY_EVERY_S:
            said = now
            logger.info(f"waiting for pods since {now - began:.0f} s: {words}")
        time.sleep(POLL_S if missing else 0)


def _ask_all(hosts: list[str], key: str, what: str, answer: str) -> dict[str, str | None]:
    """Ask all pods at once, for one that is not there takes seconds; returns why each did not answer, None: it did."""

    def ask(host: str) -> str | None:
        try:
            with connect(host, key) as connection:
                connection.settimeout(ANSWER_S)
                say(connection, {"what": what})
                return None if next(messages(connection), {}).get(answer) else ""
        except (OSError, ValueError) as error:
            return str(error)

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(ask, hosts), strict=True))


def _say_over(hosts: list[str], key: str) -> None:
    """Tell the other pods that the run is over, so that their Jobs are."""
    deadline = time.monotonic() + OVER_S
    while hosts and time.monotonic() < deadline:
        hosts = [host for host, why in _ask_all(hosts, key, "over", "over").items() if why is not None]
        time.sleep(POLL_S if hosts else 0)
    if hosts:
        logger.warning(f"{', '.join(hosts)} could not be told that the run is over: delete their Jobs")


def main() -> None:
    """Entry point."""
    if len(sys.argv) != 2:
        print("usage: python -m prime_hpc.launch.pods EXPERIMENT_FILE", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(run_in_pods(Path(sys.argv[1])))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
