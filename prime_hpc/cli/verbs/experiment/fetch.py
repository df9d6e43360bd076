"""`prime-hpc fetch FILE`: bring what a run's nodes will look for onto shared storage: models, data sets, benchmarks.

Exit codes: 0 all is there; 1 something is missing, or could not be fetched; 2 wrong config.
"""

from prime_hpc.cli.common import load, parse, print_json, say
from prime_hpc.config.site import load_site
from prime_hpc.launch.fetch.fetch import fetch_all
from prime_hpc.launch.fetch.presence import Presence
from prime_hpc.store.io.disk import size_text


def run(argv: list[str], program: str) -> int:
    """Fetch what is missing; with --check only say it."""
    given = parse("fetch", argv)
    loaded = load(given.words, "plan", program)
    done = fetch_all(
        loaded.experiment,
        load_site(loaded.experiment.slurm.site),
        into=given.path("--into"),
        check="--check" in given,
        say=say,
    )
    if "--json" in given:
        print_json(done.as_dict())
    else:
        for one in done.found:
            print(_line(one))
        for note in done.notes:
            print(f"note: {note}")
        if not done.found:
            print("nothing to fetch: no model, data set or environment of it comes from elsewhere")
    return 0 if done.is_complete else 1


def _line(one: Presence) -> str:
    """Return a need for people: `there  model  owner/name  1.2 GiB  PATH`."""
    state = "missing" if not one.is_there else "fetched" if one.is_new else "there"
    need = one.need
    name = " ".join(filter(None, [need.name, need.subset and f"({need.subset})", need.split and f"[{need.split}]"]))
    words = [f"{state:<8}{need.kind:<12}{name}"]
    if one.is_there:
        words += [] if one.num_bytes is None else [size_text(one.num_bytes)]
        words += [] if one.path is None else [str(one.path)]
        return "  ".join(words)
    text = "  ".join(words) + f"  {need.key}: {', '.join(one.lacks)}" + (f" in {one.path}" if one.path else "")
    return "; ".join(filter(None, [text, one.problem, one.remedy]))
