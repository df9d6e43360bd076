"""The documents say what is there: links, files, flags, keys, examples and lists are held to the source."""

import ast
import importlib.machinery
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from prime_hpc.cli import VERBS
from prime_hpc.config import load_experiment
from prime_hpc.config.help import COMPONENT_KEYS, ROOT, read_sections, walk
from prime_hpc.config.named_code import ALGORITHMS, OBJECTIVES
from prime_hpc.config.renamed_keys import renamed
from prime_hpc.config.site import load_site
from prime_hpc.config.sources import other_names
from prime_hpc.config.sources.flags import ALIASES
from prime_hpc.envs.env_config import BUNDLED
from prime_hpc.launch.lint.lint import lint

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDERS = ("configs", "prime_hpc", "slurm", "sweeps", "tests", "tools")
DOCUMENTS = sorted([*CHECKOUT.glob("*.md"), *(path for name in FOLDERS for path in (CHECKOUT / name).rglob("*.md"))])
NAMES = [path.relative_to(CHECKOUT).as_posix() for path in DOCUMENTS]
FOREIGN_FLAGS = (
    *("--no-push", "--no-rich"),  # vf-eval's
    *("--signal", "--export", "--environment", "--container-image", "--gpus", "--overlap", "--no-kill", "--gres"),
    "--test-only",
    *("--nv", "--rocm", "--mpi", "--standalone", "--no-deps", "--no-build-isolation"),
    "--extra-index-url",
    *("--build-arg", "--fakeroot"),
    *("--local-ranks-filter", "--log-dir", "--redirects", "--tee", "--extra"),
    *("--config.file", "--collector.textfile.directory", "--logdir", "--backend-store-uri"),
)
"""Flags of sbatch, srun, apptainer, torchrun, pip, uv, Prometheus, node exporter, TensorBoard and MLflow."""
FILE = re.compile(
    r"(?:[\w.-]+/)*[\w.-]+\.(?:py|yaml|toml|md|def|sh)\b(?!\()|(?:tools|slurm|tests|configs|sweeps)/[\w./-]+"
)
OTHER_NAMES = {name for several, _ in other_names.rows() for name in several}
"""Keys of other suites, of which one page tells."""
MADE = re.compile(
    r"outputs/|(?:run|site|sweep|exp|many|fast|slow|other|gspo|mine)\.yaml|(?:infer|train|orch)\.toml|NEW|test_X"
    r"|gpu-check\.md|/(?:half|doubled|hello|mine|staged)\.py|\b(?:rewards|FILE)\.py"
)
"""Files that a run or a reader makes."""


@cache
def text_of(name: str) -> str:
    return (CHECKOUT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str = r"\w*") -> list[str]:
    """Fenced code of a document."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text_of(name), re.MULTILINE | re.DOTALL)


def spans(name: str) -> list[str]:
    """Inline code of a document; one may go over a line's end."""
    prose = re.sub(r"^ *```.*?^ *```", "", text_of(name), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def anchors(name: str) -> set[str]:
    """The names under which GitHub knows a document's headings."""
    prose = re.sub(r"^ *```.*?^ *```", "", text_of(name), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (CHECKOUT / name).parent / path if path else CHECKOUT / name
        if not found.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(found.resolve().relative_to(CHECKOUT).as_posix()):
            wrong.append(f"{target}: no such heading")
    assert not wrong, f"{name}: {wrong}"


@pytest.mark.parametrize("name", NAMES)
def test_mentioned_files_exist(name: str) -> None:
    places = [CHECKOUT, (CHECKOUT / name).parent, CHECKOUT / "prime_hpc", CHECKOUT / "slurm"]
    folders = [path for place in places for path in (place, *place.glob("*/")) if path.is_dir()]
    wrong = []
    for word in {word for code in (*spans(name), *blocks(name)) for word in FILE.findall(code)}:
        if not MADE.search(word) and not any((folder / word.rstrip("./")).exists() for folder in folders):
            wrong.append(word)
    assert not wrong, f"{name} names files that are not there: {sorted(wrong)}"


@cache
def keys() -> dict[str, str]:
    """Every key of an experiment and of a site profile -> its annotation."""
    experiment = {path.replace(".0", ""): item.annotation for path, item, _ in walk(ROOT)}
    profile = {path.replace(".0", ""): item.annotation for path, item, _ in walk("SiteConfig")}
    return profile | experiment


def is_key(dotted: str) -> bool:
    """Whether a dotted name is a key, or one of a free mapping below a key."""
    parts = re.sub(r"\.\d+|\.N\b|\.\*$", "", dotted).replace("-", "_").split(".")
    if ".".join(parts) in keys():
        return True
    return any(
        re.match(r"Arguments|Variables|dict\[", keys().get(".".join(parts[:n]), "")) for n in range(1, len(parts))
    )


TELL_OLD_NAMES = ("CHANGELOG.md", "configs/KEYS.md")


def was_renamed(dotted: str) -> bool:
    """Whether a dotted name is what a key was called in an earlier version."""
    path = tuple(dotted.split("."))
    return renamed(path) != path


@cache
def program_flags() -> frozenset[str]:
    """Flags of verbs, tools and scripts, as their sources state them."""
    sources = [*(CHECKOUT / "prime_hpc" / "cli").rglob("*.py"), CHECKOUT / "prime_hpc" / "envs" / "workers" / "host.py"]
    sources += [path for path in (CHECKOUT / "tools").iterdir() if path.is_file() and path.suffix != ".md"]
    sources += [CHECKOUT / "slurm" / "devcluster", *(CHECKOUT / "slurm" / "devcluster.d").iterdir()]
    sources += [*(CHECKOUT / "tests" / "faults").glob("*.py"), *(CHECKOUT / "tools" / "benchmarks").glob("*.py")]
    sources += [CHECKOUT / "pyproject.toml"]
    texts = [path.read_text(encoding="utf-8") for path in sources if path.is_file()]
    return frozenset(flag for text in texts for flag in re.findall(r"--[a-z][a-z-]*", text))


def is_flag(flag: str) -> bool:
    """Whether a flag is a key (in full, or of a component), an alias, or a verb's, a tool's or another program's."""
    if flag in FOREIGN_FLAGS or flag in program_flags():
        return True
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    scopes = ("", *(f"{component}." for component in COMPONENT_KEYS))
    return name in ALIASES or any(is_key(scope + name) for scope in scopes)


@pytest.mark.parametrize("name", NAMES)
def test_flags_exist(name: str) -> None:
    found = {
        flag for code in (*spans(name), *blocks(name)) for flag in re.findall(r"(?<![\w-])--[A-Za-z][\w.-]*", code)
    }
    wrong = [f for f in found if not re.match(r"--(?:no-)?(?:[a-z]\b|KEY|SECTION)", f) and not is_flag(f.rstrip(".-"))]
    assert not wrong, f"{name} names flags that are not there: {sorted(wrong)}"


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_given_their_files_as_they_take_them(name: str) -> None:
    """`rl @ FILE`: only verbs whose first argument is a file (`prime-hpc submit FILE`) take one without the sign."""
    lines = "\n".join((*spans(name), *blocks(name)))
    programs = "rl|sft|trainer|orchestrator|inference|(?:prime-hpc )?(?:eval|synthesize)"
    wrong = re.findall(rf"^(?:.*[=&|;] *)?(?:{programs}) [\w./-]+\.(?:yaml|toml)\b.*$", lines, re.MULTILINE)
    assert not wrong, f"{name}: a config file is named without @: {wrong}"


@pytest.mark.parametrize("name", NAMES)
def test_keys_exist(name: str) -> None:
    roots = "|".join(item.name for item in read_sections()[0][ROOT].fields)
    wrong = []
    for span in spans(name):
        match = re.match(rf"((?:{roots})(?:\.[a-z_][a-z0-9_]*)+)(?:\.\*)?(?:\s*[:=].*)?$", span)
        is_file = match and re.search(r"\.(?:py|json|jsonl|yaml|toml|log|conf|md|Class)$", match[1])
        is_old = match and name in TELL_OLD_NAMES and was_renamed(match[1])
        is_other = match and name == "configs/KEYS.md" and match[1] in OTHER_NAMES
        if match and not (is_file or is_old or is_other or is_key(match[1])):
            wrong.append(match[1])
    assert not wrong, f"{name} names keys that are not there: {sorted(set(wrong))}"


@pytest.mark.parametrize("name", [name for name in NAMES if blocks(name, "yaml")])
def test_examples_of_configs_are_accepted(name: str, tmp_path: Path) -> None:
    for index, block in enumerate(blocks(name, "yaml")):
        if re.search(r"^experiment:", block, re.MULTILINE):
            continue  # a sweep
        path = tmp_path / f"{index}.yaml"
        path.write_text(block)
        is_part = block.startswith("orchestrator:") and "env:" not in block
        load_experiment(["@", str(path), *(["--orchestrator.env", "[{'id': 'x'}]"] if is_part else [])], "rl", {})


def test_lint_finds_nothing_in_the_readmes_example(tmp_path: Path) -> None:
    (block,) = blocks("README.md", "yaml")
    (tmp_path / "exp.yaml").write_text(block)
    argv = ["@", str(tmp_path / "exp.yaml"), "--slurm.site", "example", "--output-dir", "/scratch/me"]
    found = lint(load_experiment(argv, "lint", {}).experiment, load_site("example", {}))
    assert [finding.code for finding in found if finding.severity != "info"] == []


def test_the_example_of_a_sweep_is_accepted(tmp_path: Path) -> None:
    from prime_hpc.launch.sweep.resolve import load_base, resolve_points

    (block,) = (b for b in blocks("sweeps/README.md", "yaml") if "experiment:" in b)
    path = tmp_path / "sweep.yaml"
    path.write_text(block.replace("../configs", str(CHECKOUT / "configs")))
    points = resolve_points(load_base(path, [], {}))
    assert len(points) == 4 * 2 * 2 * 3 and all(point.loaded for point in points)


def test_the_reference_of_keys_is_the_schemas() -> None:
    loader = importlib.machinery.SourceFileLoader("tool_keys", str(CHECKOUT / "tools" / "keys"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert module.page() == text_of("configs/KEYS.md"), "the schema has changed: run tools/keys"
    missing = [name for name in keys() if "." not in name and f"`{name}`" not in text_of("configs/KEYS.md")]
    assert not missing


def test_names_in_recipes_are_defined() -> None:
    named = [span for span in spans("prime_hpc/README.md") if re.fullmatch(r"[\w/]+\.py:\w+", span)]
    assert len(named) > 20
    wrong = []
    for path, _, symbol in (span.partition(":") for span in named):
        tree = ast.parse(text_of(path))
        defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
        targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
        if symbol not in defined | {target.id for target in targets if isinstance(target, ast.Name)}:
            wrong.append(f"{path}:{symbol}")
    assert not wrong


def test_lists_are_whole() -> None:
    configs, tools = text_of("configs/README.md"), text_of("tools/README.md")
    for name in (*OBJECTIVES, *ALGORITHMS):
        assert f"`{name}`" in configs, f"configs/README.md does not name {name}"
    for folder in (CHECKOUT / "configs").glob("*/"):
        assert f"`{folder.name}/`" in configs, f"configs/README.md does not name {folder.name}/"
    for tool in (CHECKOUT / "tools").iterdir():
        if tool.is_file() and tool.suffix == "" and tool.name != "README":
            assert f"`{tool.name}`" in tools, f"tools/README.md does not name {tool.name}"
    for sweep in (CHECKOUT / "sweeps").glob("*.yaml"):
        assert f"`{sweep.name}`" in text_of("sweeps/README.md")
    for name in NAMES:
        assert name in ("README.md", "CHANGELOG.md") or f"]({name})" in text_of("README.md"), (
            f"README.md links no {name}"
        )
    for name in ("configs/README.md", "prime_hpc/envs/README.md"):
        texts = (CHECKOUT / name).read_text(encoding="utf-8")
        missing = [env for env in BUNDLED if env != "prompts" and f"`{env}`" not in texts]  # that one is synthesize's
        assert not missing, f"{name} does not name {missing}"


@pytest.mark.parametrize("name", NAMES)
def test_modules_that_are_named_exist(name: str) -> None:
    """`prime_hpc.a.b`, or a name `prime_hpc.a.b.Name` that stands in the module's source."""
    wrong = []
    text = text_of(name)
    recipes = {made.replace("/", ".") for made in re.findall(r"^ *# (prime_hpc/[\w/]+)\.py$", text, re.MULTILINE)}
    for dotted in set(re.findall(r"\bprime_hpc(?:\.\w+)+", text)) - recipes:
        path, _, last = dotted.replace(".", "/").rpartition("/")
        places = [CHECKOUT / f"{path}/{last}.py", CHECKOUT / path / last]
        holders = [CHECKOUT / f"{path}.py", CHECKOUT / path / "__init__.py"]
        is_name = any(re.search(rf"\b{last}\b", holder.read_text("utf-8")) for holder in holders if holder.is_file())
        if not is_name and not any(place.exists() for place in places):
            wrong.append(dotted)
    assert not wrong


def test_every_verb_is_described() -> None:
    texts = " ".join(code for name in NAMES for code in (*spans(name), *blocks(name)) if "KEYS" not in name)
    missing = [verb for verb in VERBS if not re.search(rf"(?:prime-hpc |^|[ \n(]){verb}\b", texts)]
    assert not missing


def test_every_message_of_the_bus_is_listed() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (CHECKOUT / "prime_hpc").rglob("*.py")]
    said = [words for text in sources for words in re.findall(r"\._?publish\(\s*f?\"([^\"]+)", text)]
    topics = {next(part for part in reversed(words.split("/")) if "{" not in part) for words in said}
    assert len(topics) > 5
    listed = " ".join(spans("prime_hpc/README.md"))
    assert not [topic for topic in topics if not re.search(rf"\b{topic}\b", listed)]


def test_messages_that_troubleshooting_quotes_are_said() -> None:
    rows = [line.split("|")[1] for line in text_of("slurm/TROUBLESHOOTING.md").splitlines() if line.startswith("| ")]
    quoted = [words.removesuffix(" ...?") for row in rows for words in re.findall(r"`([^`]+)`", row)]
    sources = " ".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "prime_hpc").rglob("*.py"))
    assert len(quoted) > 8
    assert not [words for words in quoted if words.strip(".") not in sources]


def test_entries_of_the_changelog_stand_in_a_room() -> None:
    """Under one of three headings, in the same order of rooms: a flat list of all changes helps nobody who upgrades."""
    unreleased = text_of("CHANGELOG.md").split("\n## ")[1]
    parts = [part.split("\n", 1) for part in unreleased.split("\n### ")[1:]]
    assert [title for title, _ in parts] == ["Act on this", "New", "Fixed"]
    rooms = {title: re.findall(r"^#### (.+)$", text, re.MULTILINE) for title, text in parts}
    assert rooms["Fixed"] == [room for room in rooms["New"] if room in rooms["Fixed"]]
    assert not [title for title, text in parts if text.split("\n#### ")[0].strip()], "entries before the first room"


def test_the_readme_is_short() -> None:
    assert text_of("README.md").count("\n") <= 150, "what is more belongs beside what it describes"


def test_every_room_stands_in_the_tree() -> None:
    rooms = {path.parent.name for path in (CHECKOUT / "prime_hpc").glob("*/__init__.py")}
    (tree,) = (block for block in blocks("README.md") if block.startswith("prime_hpc/"))
    assert not [room for room in rooms if not re.search(rf"^  .*\b{room}/", tree, re.MULTILINE)]
    inner = {path.parent for path in (CHECKOUT / "prime_hpc").glob("*/*/__init__.py")}
    rows = {line.split("`")[1]: line for line in text_of("prime_hpc/README.md").splitlines() if line.startswith("| `")}
    assert not [path for path in inner if f"`{path.name}/`" not in rows.get(f"{path.parent.name}/", "")]


def test_modules_named_in_docstrings_are_there() -> None:
    files = [f"/{path.relative_to(CHECKOUT).as_posix()}" for path in (CHECKOUT / "prime_hpc").rglob("*.py")]
    gone = [
        f"{source.relative_to(CHECKOUT)}: {name}"
        for source in (CHECKOUT / "prime_hpc").rglob("*.py")
        for name in re.findall(r"`([\w./]+\.py)\b", source.read_text(encoding="utf-8"))
        if not any(file.endswith(f"/{name}") for file in files) and not (CHECKOUT / name).exists()
        if not MADE.search(name)
    ]
    assert not gone
