"""`prime-hpc runs add|list|remove|resume PARENT ...`: the runs below a run whose trainer trains many.

Exit codes: 0 done; 2 wrong usage, or a run that cannot share the parent's trainer.
"""

from prime_hpc.cli.common import Given, parse
from prime_hpc.cli.verb_table import VERBS
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.child_commands import (
    Parent,
    Row,
    add_child,
    find_child,
    find_parent,
    list_rows,
    load_child,
    remove_child,
    resume_child,
    when_taken_up,
)
from prime_hpc.observe.table import align

NO_TRAINER = "its trainer does not run, and {} when it is back"
TIMEOUT_S = 600.0
"""Wait for the save of a run that is removed."""


def run(argv: list[str], program: str) -> int:
    """Do what the first word says."""
    if not argv or argv[0] not in VERBS["runs"].actions:
        raise ConfigError(f"usage: {parse('runs', []).usage}")
    action = argv[0]
    given = parse("runs", argv[1:], action)
    if not given.words or given.words[0].startswith("-"):
        raise ConfigError(f"usage: {given.usage}")
    parent = find_parent(given.words[0])
    if action == "add":
        return _add(parent, given)
    if action == "list":
        given.arguments(1)
        rows = list_rows(parent.directory)
        given.tell(lambda: [row.as_dict() for row in rows], lambda: render(rows))
        return 0
    path = find_child(parent.directory, given.arguments(2, least=2)[1])
    if action == "remove":
        said = remove_child(path, delete="--delete" in given, timeout_s=given.positive("--timeout") or TIMEOUT_S)
    else:
        said = f"{resume_child(path)}; {when_taken_up(path)}"
    given.tell(lambda: {"name": path.name, "path": str(path), "said": said}, lambda: f"{path.name}: {said}")
    return 0


def _add(parent: Parent, given: Given) -> int:
    path = add_child(parent, load_child(parent, given.words[1:], given.get("--id")))
    given.tell(lambda: {"name": path.name, "path": str(path)}, lambda: f"added {path}; {when_taken_up(path)}")
    return 0


def render(rows: list[Row]) -> str:
    """One line a run."""
    if not rows:
        return "no runs yet; add one with `prime-hpc runs add PARENT CHILD.yaml`\n"
    table = [("RUN", "STATE", "STEP", "SLOT", "TOKENS", "NOTE")]
    for row in rows:
        state = row.state
        if state is None:
            note = NO_TRAINER.format("takes it up") if row.is_at_rest else "not seen by a trainer yet"
            table.append((row.name, "new", "-", "-", "-", note))
            continue
        slot = "-" if state.slot is None or row.is_at_rest else str(state.slot)
        phase = "at rest" if row.is_at_rest else state.phase
        note = "is saved and ended" if row.is_to_stop else state.reason or ""
        if row.is_at_rest:
            note = NO_TRAINER.format("ends it" if row.is_to_stop else "goes on with it")
        step = f"{state.step}/{state.max_steps}" if state.max_steps else "-"
        table.append((row.name, phase, step, slot, f"{state.num_tokens:,}", note))
    return "\n".join(align(table)) + "\n"
