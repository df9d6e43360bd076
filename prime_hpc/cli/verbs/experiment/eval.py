"""`prime-hpc eval`: evaluate in the foreground, or compare two evaluations that are there.

Exit codes: 0 done, 1 it failed (or too many episodes did; the results are there), 2 wrong usage or config,
130 interrupted; started again, it goes on with the episodes that are missing.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prime_hpc.cli.common import Given, load, parse, print_json, say
from prime_hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from prime_hpc.config import Experiment


def run(argv: list[str], program: str) -> int:
    """Do it; returns the exit code. Raises ConfigError."""
    given = parse("eval", argv)
    if "--compare" in given:
        return _compare(given)
    return run_alone(argv, program, "eval")


def run_alone(argv: list[str], program: str, kind: str) -> int:
    """Run a job without a trainer (`eval`, `synthesize`); returns the exit code.
    Raises ConfigError: as the config is wrong."""
    given = parse(kind, argv)
    loaded = load(given.words, kind, program)
    says_where = ("inference", f"{kind}.client")  # keys that say which servers are meant
    if not any(key.startswith(says_where) for key in loaded.provenance) and not loaded.experiment.clean:
        was_attached = _was_attached(loaded.experiment)
        url = _local_server(loaded.experiment.model.name) if was_attached is not False else None
        if url is not None:
            say(f"{program}: {url} serves {loaded.experiment.model.name}: attached (--inference starts another)")
            loaded = load([*given.words, "--client.base-url", url], kind, program)
        elif was_attached:
            said = f"servers that {loaded.experiment.run_dir} was attached to have played its episodes"
            remedy = "start `prime-hpc inference` again, state --client.base-url, or choose another --name"
            raise ConfigError(f"{said}, and none is found here: {remedy}", f"{kind}.client")
    from prime_hpc.launch import local

    if "--dry-run" in given:
        return local.show_run(loaded, as_json="--json" in given)
    if "--json" not in given:
        return local.run(loaded)
    path = loaded.experiment.run_dir / "results" / "summary.json"
    before = _written(path)
    code = _with_stdout_aside(lambda: local.run(loaded))
    if _written(path) not in (None, before):  # of this command, which may have ended before it wrote one
        print_json(json.loads(path.read_text(encoding="utf-8")))
    return code


def _was_attached(experiment: "Experiment") -> bool | None:
    """Return whether the episodes that are there were played by servers that the run did not start, as those to come
    have to be; None: there are none."""
    from prime_hpc.evals.settings import recorded

    before = recorded(experiment.run_dir)
    return None if before is None else before.get(f"{experiment.kind}.client.api") is not None


def _written(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written anew; None: there is none."""
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _local_server(model: str) -> str | None:
    """Return the server that this user has started here by hand (`inference`), where it serves this model."""
    from prime_hpc.client.http import ask
    from prime_hpc.client.keys import find_key, is_user_listener
    from prime_hpc.config.absolute import local_directory
    from prime_hpc.config.sections.inference import DEFAULT_PORT
    from prime_hpc.config.sections.standalone_eval import StandaloneClientConfig

    url = f"http://127.0.0.1:{DEFAULT_PORT}/v1"
    stated = os.environ.get(StandaloneClientConfig.model_fields["api_key_var"].default)  # it wins, there and here
    key = (stated if is_user_listener(DEFAULT_PORT) else None) or find_key(url)
    if key is None:
        return None
    try:
        served = {row["id"] for row in json.loads(ask(f"{url}/models", timeout_s=2, key=key))["data"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url if served & {model, str(local_directory(model))} else None  # a directory is served by its whole path


def _with_stdout_aside(call):  # type: ignore[no-untyped-def]
    """Keep standard output for the JSON alone; what the run says meanwhile goes to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        return call()
    finally:
        sys.stdout = out


def _compare(given: Given) -> int:
    from prime_hpc.evals.compare import compare, lines, read_side

    found = compare(*map(read_side, given.arguments(2, least=2)))
    given.tell(lambda: found, lambda: "\n".join(lines(found)))
    return 0
