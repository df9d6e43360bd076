"""The recipes of prime_hpc/README.md, followed in a copy of the package as somebody who extends it would."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

from tests.unit.test_arrows import MOST_FILES

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES = (CHECKOUT / "prime_hpc" / "README.md").read_text(encoding="utf-8")

TRY = """
import numpy as np
from prime_hpc.cli import main
from prime_hpc.config import load_experiment
from prime_hpc.orchestrator.algorithms import RewardGroup, get_algorithm

argv = ["--trainer.loss.type", "half", "--orchestrator.advantage.type", "doubled"]
experiment = load_experiment(["@", "configs/reverse_text/rl.yaml", *argv], "rl", {}).experiment
group = RewardGroup(np.array([0.0, 1.0]), np.array([3, 3]), "env", 0)
algorithm = get_algorithm(experiment.orchestrator.advantage.type).build(experiment.orchestrator.advantage)
assert algorithm.score_group(group).tolist() == [-1.0, 1.0]
assert main(["hello", "you"]) == main(["hello", "--json", "you"]) == 0 and main(["hello"]) == 2
from prime_hpc.cli.complete import complete

assert "--json" in complete(["prime-hpc", "hello", "--j"])
assert main(["render", "configs/reverse_text/slurm_packed.yaml", "--slurm.core-spec", "2"]) == 0

from prime_hpc.config.site import GENERIC
from prime_hpc.launch.lint.lint import lint

served = ["--inference.backend", "mine", "--model.lora.rank", "4", "--launch", "local"]
experiment = load_experiment(["@", "configs/reverse_text/rl.yaml", *argv, *served], "rl", {}).experiment
refused = [finding for finding in lint(experiment, GENERIC) if finding.code == "PH124"]
assert [(finding.key, finding.message) for finding in refused] == [("model.lora", "my engine serves no adapters")]

import dataclasses
from pathlib import Path
from prime_hpc.store.batch import rank_batch
from prime_hpc.store.export import _PER_SEQUENCE

batch = rank_batch.RankBatch(
    **{name: np.zeros({"token": 3, "sequence": 2}.get(spec.per, 3), spec.dtype)
       for name, spec in rank_batch.SPECS.items() if name in rank_batch.REQUIRED and spec.per != "offsets"},
    seq_offsets=np.array([0, 2, 3]), micro_offsets=np.array([0, 1, 2]),
)
harder = dataclasses.replace(batch, difficulties=np.array([0.25, 0.5], np.float32))
harder.check()
encoded = b"".join(bytes(memoryview(part).cast("B")) for part in rank_batch.encode_rank(harder))
read = rank_batch.decode_rank(np.frombuffer(encoded, np.uint8), Path("batch"))
assert rank_batch.select_micro_batches([(read, 1), (batch, 0)], 2).difficulties.tolist() == [0.5, 0.0]
assert _PER_SEQUENCE["difficulty"] == "difficulties"
try:
    dataclasses.replace(harder, difficulties=np.array([0.25, -1], np.float32)).check()
    raise AssertionError("out of its range")
except ValueError as error:
    assert "difficulties: holds values below 0" in str(error)

import contextlib
from pathlib import Path

from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.store.artifact import Manifest, commit_stage, prepare_stage, stage_dir
from prime_hpc.weight_transport.transport import Place, VersionReader, WholeFile, load_transport, transport_of

final = Path("run/weights/step_000001").resolve()
weights = WeightsConfig(transport="staged")
sender = load_transport(weights.transport).sender(weights, [WholeFile("model.safetensors", 6, b"head", True)], 0)
with contextlib.ExitStack() as stack:
    sender.open(sender.plan(1), prepare_stage(final), stack)
    sender.write(Place("model.safetensors", 4, 2), b"ab")
    entries, facts = sender.finalize()
manifest = Manifest("weights", 1, 1, "test", 0, entries, sender.meta([facts]))
sender.sent(commit_stage(stage_dir(final), final, manifest))
reader = VersionReader(Path("scratch").resolve())
for _ in range(2):
    copy = reader.fetch(final, transport_of(manifest))
    assert copy != final and (copy / "model.safetensors").read_bytes() == b"headab"

import torch
from prime_hpc.trainer.objectives import get_objective

class Targets:
    advantages, logprobs = torch.tensor([2.0]), torch.tensor([-3.0])

loss = experiment.trainer.loss
assert get_objective(loss.type)(Targets, loss, loss.bounds).loss.tolist() == [3.0]
"""


def recipe(title: str) -> str:
    """The text below a heading."""
    return RECIPES.split(f"\n### {title}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]


def place(title: str, name: str) -> str:
    """The file in which a recipe finds a name."""
    found = re.search(rf"`([\w/]+\.py):{name}`", recipe(title))
    assert found, f"the recipe {title!r} does not say where {name} is"
    return found[1]


def insert(path: Path, after: str, text: str) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(re.findall(after, source, re.MULTILINE)) == 1, f"{path}: {after}"
    path.write_text(re.sub(after, lambda match: match[0] + text, source, flags=re.MULTILINE), encoding="utf-8")


def write_new_file(copy: Path, title: str) -> Path:
    """The recipe's new file, whose first line names it."""
    code = textwrap.dedent(re.findall(r"^ *```python\n(.*?)^ *```", recipe(title), re.MULTILINE | re.DOTALL)[0])
    first, _, text = code.partition("\n")
    path = copy / first.removeprefix("# ")
    path.write_text(text, encoding="utf-8")
    return path


def test_recipes_lead_to_what_they_promise(tmp_path: Path) -> None:
    shutil.copytree(CHECKOUT / "prime_hpc", tmp_path / "prime_hpc")  # its bytecode too: times of files come along
    (tmp_path / "configs").symlink_to(CHECKOUT / "configs")
    for title, table in (
        ("An objective", "OBJECTIVES"),
        ("An advantage algorithm", "ALGORITHMS"),
        ("An inference backend", "BACKENDS"),
        ("A weight transport", "TRANSPORTS"),
    ):
        made = write_new_file(tmp_path, title)
        row = re.search(rf'`("{made.stem}": .*,)`', recipe(title))
        assert row, title
        insert(tmp_path / place(title, table), rf"^{table} = \{{", f"\n    {row[1]}")
    title = "A field of the batch"
    lines = re.search(r"```python\n(.*?)^ *```", recipe(title), re.MULTILINE | re.DOTALL)
    assert lines
    field = "\n" + textwrap.indent(textwrap.dedent(lines[1]), "    ")
    insert(tmp_path / place(title, "RankBatch"), r'^    totals: .*\n    """.*"""\n', field)
    write_new_file(tmp_path, "A verb of the command line")
    row = re.search(r'`("hello": Verb\(.*\),)`', recipe("A verb of the command line"))
    assert row
    insert(tmp_path / place("A verb of the command line", "VERBS"), r"^VERBS: .* = \{", f"\n    {row[1]}")
    option = "A Slurm option"
    field = '\n    core_spec: str | None = None\n    """Specialised cores."""\n'
    insert(
        tmp_path / place(option, "SlurmOptions"),
        r'^class SlurmOptions\(.*\n    """.*"""\n(\n    model_config.*\n)?',
        field,
    )
    insert(tmp_path / place(option, "KEYED"), r"^KEYED: .* = \{", '\n    "core_spec": Traits(),')
    files = Counter(path.parent for path in (tmp_path / "prime_hpc").rglob("*.py"))
    assert not {folder: count for folder, count in files.items() if count > MOST_FILES}, "a recipe fills a folder"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PRIME"))}
    environ |= {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", TRY], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "hello you" in done.stdout and '["you"]' in "".join(done.stdout.split())
    assert "#SBATCH --core-spec=2" in done.stdout


def test_layouts_are_named_where_the_recipe_says() -> None:
    names = re.compile(r"""\blayout\b["']?(?: (?:==|!=|in|not in) |: |=)["'](?:het|packed)""")
    sources = {path: path.read_text(encoding="utf-8") for path in (CHECKOUT / "prime_hpc").rglob("*.py")}
    places = {path.relative_to(CHECKOUT).as_posix() for path, text in sources.items() if names.search(text)}
    assert places == {place("A layout", name) for name in ("choose_layout", "for_pods", "open_point_record")}
