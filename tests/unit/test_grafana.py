"""The Grafana dashboard: the file is what its table says, and asks for metrics and labels that there are."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.supervisor.prometheus.families import FAMILIES, PREFIX
from prime_hpc.supervisor.prometheus.figures import Figures

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "grafana"
DASHBOARD = json.loads((FOLDER / "prime-hpc.json").read_text())
TARGETS = [(panel, target) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
NAME = re.compile(r"\b(?:prime_hpc_|vllm:)\w+")
COUNTED_WHOLE = ("run_alarms_total", "role_restarts_total", "run_attempts_ended_total")
"""Few enough to be read as numbers."""
WAIT_S = 280


def titled(item: tuple[dict[str, Any], dict[str, Any]]) -> str:
    return f"{item[0]['title']} {item[1]['refId']}"


def test_the_file_is_what_the_table_says() -> None:
    command = [sys.executable, str(FOLDER / "make.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def labels_of(name: str) -> set[str]:
    if name.startswith(PREFIX):
        return {"run", *FAMILIES[name].labels}
    return {"run", "server", "engine", "model_name", "le"}


@pytest.mark.parametrize("item", TARGETS, ids=titled)
def test_a_panel_asks_for_what_there_is(item: tuple[dict[str, Any], dict[str, Any]]) -> None:
    expression, legend = item[1]["expr"], item[1]["legendFormat"]
    names = NAME.findall(expression)
    assert names
    for name in names:
        assert name in FAMILIES if name.startswith(PREFIX) else name.startswith("vllm:")
        is_counter = name in FAMILIES and FAMILIES[name].kind == "counter"
        assert (
            not is_counter or name.removeprefix(PREFIX) in COUNTED_WHOLE or re.search(rf"rate\({name}", expression)
        ), f"{name} without rate"
    there = set.intersection(*(labels_of(name) for name in names))
    matched = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression))
    grouped = {word for group in re.findall(r"by \(([^)]*)\)", expression) for word in group.split(", ")}
    shown = set(re.findall(r"{{(\w+)}}", legend))
    assert matched | grouped | shown <= there
    assert not grouped or shown <= grouped
    assert 'run=~"$run"' in expression and "run" in shown


def test_servers_metrics_are_vllms_own() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(found.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    named = {name for _, target in TARGETS for name in NAME.findall(target["expr"]) if name.startswith("vllm:")}
    missing = {name for name in named if f'"{re.sub("_(bucket|total)$", "", name)}"' not in source}
    assert named and not missing


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells
        cells |= own
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_promtool_finds_nothing_wrong_with_our_names() -> None:
    tool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool (apt-get install prometheus)")
    figures = Figures("demo")
    for name, family in FAMILIES.items():
        figures.put(name.removeprefix(PREFIX), 1.0, *("x" for _ in family.labels))
    checked = subprocess.run(
        [tool, "check", "metrics"], input=figures.text(), capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
