"""`prime-hpc runs add|list|remove|resume PARENT ...`: the runs below a run whose trainer trains many.

Exit codes: 0 done; 2 wrong usage, or a run that cannot share the parent's trainer.
"""

from prime_hpc.cli.common import print_json, refuse_unknown, take_flags
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.child_runs import (
    Row,
    add_child,
    find_child,
    find_parent,
    list_rows,
    load_child,
    remove_child,
    resume_child,
)

USAGE = "prime-hpc runs add PARENT CHILD.yaml [--id ID] [--KEY VALUE ...] | list PARENT | remove|resume PARENT ID"
ACTIONS = ("add", "list", "remove", "resume")


def run(argv: list[str], program: str) -> int:
    """Do what the first word says."""
    rest, given, values = take_flags(argv, ("--json", "--delete"), ("--id", "--timeout"))
    if len(rest) < 2 or rest[0] not in ACTIONS:
        raise ConfigError(f"usage: {USAGE}")
    action, parent_word, arguments = rest[0], rest[1], rest[2:]
    as_json = "--json" in given
    parent = find_parent(parent_word)
    if action == "add":
        return _add(parent_word, arguments, values.get("--id"), as_json)
    if action == "list":
        refuse_unknown(arguments, 0, USAGE)
        rows = list_rows(parent.directory)
        print_json([row.as_dict() for row in rows]) if as_json else print(render(rows), end="")
        return 0
    refuse_unknown(arguments, 1, USAGE)
    if not arguments:
        raise ConfigError(f"which run? usage: {USAGE}")
    path = find_child(parent.directory, arguments[0])
    if action == "remove":
        said = remove_child(path, delete="--delete" in given, timeout_s=_seconds(values.get("--timeout", "600")))
    else:
        said = resume_child(path) + "; the trainer takes it up when a slot is free"
    print_json({"name": path.name, "path": str(path), "said": said}) if as_json else print(f"{path.name}: {said}")
    return 0


def _add(parent_word: str, arguments: list[str], identifier: str | None, as_json: bool) -> int:
    parent = find_parent(parent_word)
    path = add_child(parent, load_child(parent, arguments, identifier))
    if as_json:
        print_json({"name": path.name, "path": str(path)})
    else:
        print(f"added {path}; the trainer takes it up when a slot is free")
    return 0


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--timeout needs a number of seconds, got {text!r}") from None


def render(rows: list[Row]) -> str:
    """One line a run."""
    if not rows:
        return "no runs yet; add one with `prime-hpc runs add PARENT CHILD.yaml`\n"
    table = [("RUN", "STATE", "STEP", "SLOT", "TOKENS", "NOTE")]
    for row in rows:
        state = row.state
        if state is None:
            table.append((row.name, "new", "-", "-", "-", "not seen by a trainer yet"))
            continue
        slot = "-" if state.slot is None else str(state.slot)
        step = f"{state.step}/{state.max_steps}"
        table.append((row.name, state.phase, step, slot, f"{state.num_tokens:,}", state.reason or ""))
    widths = [max(len(cells[i]) for cells in table) for i in range(5)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(cells, widths, strict=False)), cells[5]]) for cells in table]
    return "\n".join(line.rstrip() for line in lines) + "\n"
