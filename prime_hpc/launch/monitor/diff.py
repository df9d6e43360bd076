"""Differences between two runs: config, code, packages, command line; and their figures side by side.

Reads `run.yaml`, `lock.json`, `attempts.jsonl` and `metrics/*.jsonl` of both.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ATTEMPTS_JSONL, LOCK_JSON, RUN_YAML
from prime_hpc.config.secret import Secret, anchored, hide
from prime_hpc.config.sources.files import explain_yaml
from prime_hpc.evals.episodes import RESULTS
from prime_hpc.evals.summary import SUMMARY
from prime_hpc.launch.monitor.run_facts import number
from prime_hpc.launch.monitor.run_progress import iterate_json, values_of
from prime_hpc.observe.bench import read_figures
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metric_names import evaluated
from prime_hpc.store.run_dirs import read_json, read_rows

_OF_THE_DIRECTORY = ("name", "output_dir")
"""Keys that say where a run is: the two directories are named anyway."""
_FIGURES: dict[str, Sequence[str]] = {
    "trainer": ("time/step", "loss", "tokens_per_s", "tokens_per_s_overall"),
    "orchestrator": ("reward/mean", "tokens/sampled_per_second", "lag/mean"),
}
"""Metrics of each role's steps that are read; only a row with the first is a step's."""
_LOCK_KEYS = ("python", "platform", "host", "cwd")
Pair = tuple[Any, Any]


def compare_runs(a: Path, b: Path) -> dict[str, Any]:
    """Two runs.

    Returns:
        `runs` [a, b]; `config`, `packages`, `environment`: key -> [a's, b's] of what differs (None: absent there);
        `code`: sha, changed (files that differ from the commit) and same_changes; `command` [a, b];
        `figures`: name -> {a, b, ratio}; `missing`: files that one of them lacks.
    """
    locks = [read_json(run / LOCK_JSON) or {} for run in (a, b)]
    config = config_changes(stated_config(a), stated_config(b), but=_OF_THE_DIRECTORY)
    missing = [str(run / name) for run in (a, b) for name in (RUN_YAML, LOCK_JSON) if not (run / name).exists()]
    return {
        "runs": [str(a), str(b)],
        "config": config,
        "code": _code([lock.get("git") or {} for lock in locks]),
        "packages": package_changes(*locks),
        "environment": differences(*({k: lock.get(k) for k in _LOCK_KEYS} for lock in locks)),
        "command": [lock.get("command") for lock in locks],
        "figures": beside(run_figures(a), run_figures(b)),
        "missing": missing,
    }


def package_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the packages that differ between two locks, by name -> [a's, b's version]; those of the engines' own
    environments, where both locks know them, as `NAME (inference.python)`."""
    found = differences(*(lock.get("packages") or {} for lock in (a, b)))
    engines = [lock.get("engines") or {} for lock in (a, b)]
    for section in engines[0].keys() & engines[1].keys():
        own = [engine[section].get("packages") or {} for engine in engines]
        if all(own):
            found |= {f"{name} ({section}.python)": pair for name, pair in differences(*own).items()}
    return found


def compare_files(a: Path, b: Path) -> dict[str, Any]:
    """Two files of benchmark figures: a JSON object, or text that ends in one, as `tools/bench NAME --json` prints.
    Returns `runs` [a, b], `figures` by flattened key, and `config`: what is no number and differs.
    Raises ConfigError: a file holds no such object."""
    values = [flatten(_figures_of_file(path)) for path in (a, b)]
    numbers = [{k: float(v) for k, v in row.items() if _is_number(v)} for row in values]
    others = [{k: v for k, v in row.items() if not _is_number(v)} for row in values]
    return {"runs": [str(a), str(b)], "config": differences(*others), "figures": beside(*numbers)}


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as dotted keys; items of a list that holds mappings by their index, other lists as one
    value."""
    if isinstance(tree, Mapping) and tree:
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, Mapping | list) for item in tree):
        items = enumerate(tree)
    else:
        return {prefix: tree} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Keys whose values differ, with both values, in a's order and then b's; None where a key is absent. What is empty
    in one and has keys of its own in the other is these."""
    keys = [*a, *(key for key in b if key not in a)]
    changed = {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}
    return {
        key: pair
        for key, pair in changed.items()
        if not ([] in pair or {} in pair) or not any(other.startswith(f"{key}.") for other in changed)
    }


def config_changes(a: Mapping[str, Any], b: Mapping[str, Any], *, but: Sequence[str]) -> dict[str, Pair]:
    """Keys of two configs whose values differ, secrets hidden; without `but` and what is below these."""
    found = differences(flatten(a), flatten(b))
    return {
        key: _hidden(key, pair)
        for key, pair in found.items()
        if not any(key == left_out or key.startswith(f"{left_out}.") for left_out in but)
    }


def beside(a: Mapping[str, float | None], b: Mapping[str, float | None]) -> dict[str, dict[str, float | None]]:
    """Figures of both with b's ratio to a's."""
    rows: dict[str, dict[str, float | None]] = {}
    for key in [*a, *(key for key in b if key not in a)]:
        one, two = a.get(key), b.get(key)
        rows[key] = {"a": one, "b": two, "ratio": two / one if one and two is not None else None}
    return rows


def run_figures(run: Path) -> dict[str, float | None]:
    """Collect what a run came to; only what it has.

    steps, reward and loss of the last step, held-out reward by environment, medians of the steps: seconds, tokens/s of
    trainer and engines, staleness; scores of an evaluation; attempts, hours, and the share of the time from the first
    start to the last end in which the trainer trained.
    """
    evaluations: dict[str, dict[int, float]] = {}
    trainer = _by_step(iterate_json(metrics_file(run, "trainer")), _FIGURES["trainer"])
    last = trainer[-1]["step"] if trainer else None
    rows = _watched(iterate_json(metrics_file(run, "orchestrator")), evaluations, last)
    rollouts = _by_step(rows, _FIGURES["orchestrator"])
    figures: dict[str, float | None] = {"steps": float(len(trainer))}
    figures["reward (last step)"] = _last(rollouts, "reward/mean")
    figures["reward (mean of last 10)"] = _mean(values_of(rollouts[-10:], "reward/mean"))
    figures |= _scores(run)
    figures |= {f"held-out reward of {env} (last)": values[max(values)] for env, values in sorted(evaluations.items())}
    figures["loss (last step)"] = _last(trainer, "loss")
    figures["s/step (median)"] = _median(trainer[1:] or trainer, "time/step")  # the first waits for the start-up
    figures["trainer tokens/s (median)"] = _median(trainer, "tokens_per_s")
    figures["tokens/s overall (median)"] = _median(trainer[1:] or trainer, "tokens_per_s_overall")
    figures["engine tokens/s (median)"] = _median(rollouts, "tokens/sampled_per_second")
    figures["lag, versions (mean)"] = _mean(values_of(rollouts, "lag/mean"))
    figures |= _times(read_rows(run / ATTEMPTS_JSONL))
    figures |= read_figures(run)
    return {key: value for key, value in figures.items() if value is not None}


def _by_step(rows: Iterable[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Those of a metrics file that have the first of `keys`, as far as these, by ascending step: of a run that went
    back to a checkpoint, those since then."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        if keys[0] in row:
            while found and next(reversed(found)) >= row["step"]:
                found.popitem()
            found[row["step"]] = {key: row[key] for key in ("step", *keys) if key in row}
    return list(found.values())


def _watched(
    rows: Iterable[dict[str, Any]], scores: dict[str, dict[int, float]], last: int | None
) -> Iterator[dict[str, Any]]:
    """Hand rows of the orchestrator on, and note held-out rewards by environment and version; none of a version that
    the run, of `last` steps, went back behind."""
    known: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # most rows have the same metrics
    for row in rows:
        if (names := tuple(row)) not in known:
            known[names] = [(key, env) for key in names if (env := evaluated(key))]
        for key, env in known[names] if last is None or row["step"] <= last else ():
            if _is_number(row[key]):
                scores.setdefault(env, {})[row["step"]] = float(row[key])
        yield row


def _scores(run: Path) -> dict[str, float | None]:
    """Return what an evaluation came to, by environment, of the last version that it is done with."""
    versions = (read_json(run / RESULTS / SUMMARY) or {}).get("versions") or [{}]
    found: dict[str, float | None] = {}
    for env, own in versions[-1].get("environments", {}).items():
        found[f"score of {env} (last version)"] = number((own.get("avg") or {}).get("value"))
        found |= {f"pass@{k} of {env}": number(passed["value"]) for k, passed in (own.get("pass") or {}).items()}
        found[f"completion tokens of {env} (mean)"] = number((own.get("completion_tokens") or {}).get("mean"))
    return found


def _times(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return attempts, hours from the first start to the last end, and the useful share of them."""
    if not rows:
        return {}
    began, ended = values_of(rows, "began"), values_of(rows, "ended")
    span = max(ended) - min(began) if began and ended else 0.0
    useful = sum((row.get("seconds") or {}).get("useful", 0.0) for row in rows)
    return {
        "attempts": float(len(rows)),
        "hours": span / 3600 if span > 0 else None,
        "effective training time (share)": useful / span if span > 0 else None,
    }


def stated_config(run: Path) -> Any:
    """Return the content of a run's `run.yaml`; {} where it cannot be read. Raises ConfigError where it is no YAML."""
    import yaml

    try:
        text = (run / RUN_YAML).read_text(encoding="utf-8")
        # secrets are compared by what they are, wherever each run keeps them
        return hide(anchored(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), run))
    except OSError:
        return {}
    except yaml.YAMLError as error:
        raise ConfigError(explain_yaml(error, str(run / RUN_YAML))) from error


def _code(gits: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "sha": [git.get("sha") for git in gits],
        "changed": [len(git.get("status") or []) for git in gits],
        "same_changes": (gits[0].get("diff") or "") == (gits[1].get("diff") or ""),
    }


def _figures_of_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for candidate in (text, text.rpartition("\n")[2]):
        try:
            value = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    raise ConfigError(f"{path} is no run and holds no JSON object of figures")


def _hidden(key: str, pair: Pair) -> Pair:
    if not any(isinstance(value, Secret) for value in pair):
        return pair
    return ("***" if pair[0] else pair[0], "*** (another)" if pair[1] else pair[1])


def _is_number(value: Any) -> bool:
    return number(value) is not None


def _last(rows: list[dict[str, Any]], key: str) -> float | None:
    values = values_of(rows, key)
    return values[-1] if values else None


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = values_of(rows, key)
    return statistics.median(values) if values else None
