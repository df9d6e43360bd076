"""The folder that runs share with a Prometheus: the token, where each run answers, and the text files.

<output_dir>/.prometheus/token           bearer token, for its user alone; made once, so that a config stays valid
<output_dir>/.prometheus/<run>.json      where a run answers now, for `file_sd_configs`; gone when its attempt ends
<output_dir>/.prometheus/<run>.prom      its figures, for node exporter's textfile collector; gone likewise
"""

import contextlib
import json
import os
from pathlib import Path

from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.store.io.private import open_private
from prime_hpc.store.messaging.auth import new_secret
from prime_hpc.store.run_dirs import POINTS

FOLDER = ".prometheus"
TOKEN = "token"
_MOST_BYTES = 4096


def folder_of(run_dir: Path, stated: Path | None) -> Path:
    """Return a run's folder: the stated one (`prometheus.folder`), else that of its `output_dir`, or of its sweep's."""
    above = run_dir.parent
    return stated or (above.parent if (above / POINTS).exists() else above) / FOLDER


def label_of(run_dir: Path) -> str:
    """Return the name of a run in labels: of a sweep's point `sweep/point`, as `prime-hpc status` shows it."""
    parent = run_dir.parent
    return f"{parent.name}/{run_dir.name}" if (parent / POINTS).exists() else run_dir.name


def file_of(folder: Path, run: str, suffix: str) -> Path:
    """Return a run's file in the folder."""
    return folder / f"{run.replace('/', '__')}{suffix}"


def take_token(folder: Path) -> str:
    """Return the folder's token; a new one where there is none.

    Raises:
        NotPrivateError: others may read it, or it is not this user's.
        OSError: it cannot be read or made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / TOKEN
    with contextlib.suppress(FileNotFoundError):
        return read_token(folder)
    draft = folder / f".{TOKEN}-{os.getpid()}-{new_secret()[:8]}"
    descriptor = open_private(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, f"{new_secret()}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)  # whole, or not at all; of two runs that begin at once one's stands
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        draft.replace(path)
    draft.unlink(missing_ok=True)
    return read_token(folder)


def read_token(folder: Path) -> str:
    """Return the folder's token.

    Raises:
        FileNotFoundError: there is none.
        NotPrivateError: others may read it, or it is not this user's.
        OSError: it cannot be read, or it is empty.
    """
    path = folder / TOKEN
    descriptor = open_private(path, os.O_RDONLY)
    try:
        token = os.read(descriptor, _MOST_BYTES).decode("ascii", errors="replace").strip()
    finally:
        os.close(descriptor)
    if not token:
        raise OSError(f"{path} is empty: remove it, and the next run makes a new one")
    return token


def write_target(folder: Path, run: str, address: str) -> None:
    """Say where a run answers. `run` is asked for by name, so that another run that gets the port later is not taken
    for it, and is the instance's name, so that its curves go on over attempts. Raises OSError."""
    labels = {"instance": run, "__param_run": run}
    text = json.dumps([{"targets": [address], "labels": labels}])
    write_atomic(file_of(folder, run, ".json"), text, sync=False)


def read_target(folder: Path, run: str) -> str | None:
    """Return the address at which a run answers; None where none is stated."""
    try:
        groups = json.loads(file_of(folder, run, ".json").read_text(encoding="utf-8"))
        return str(groups[0]["targets"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def scrape_config(folder: Path) -> str:
    """Return what Prometheus needs to find and to read all runs of a folder, for its `scrape_config_files` or for the
    list below `scrape_configs`."""
    return f"""\
scrape_configs:
  - job_name: {json.dumps(f"prime-hpc {folder.parent}")}
    metrics_path: /metrics
    authorization:
      credentials_file: {json.dumps(str(folder / TOKEN))}
    file_sd_configs:
      - files: [{json.dumps(str(folder / "*.json"))}]
        refresh_interval: 30s
"""
