"""The page: the data of one or more runs and everything that draws them, as a single HTML file.

Scripts and styles are in `assets/`, inlined; curves are drawn by uPlot (MIT, `assets/uPlot.LICENSE`), which is vendored
so that the page needs no network. Data is JSON in which `<` is escaped: no text of a rollout can end its element.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from prime_hpc.runtime.trees import with_leaves

SCRIPTS = ("uPlot.iife.min.js", "basics.js", "charts.js", "timeline.js", "rollouts.js", "compare.js", "views.js")
STYLES = ("uPlot.min.css", "page.css")


def render_page(runs: Sequence[Mapping[str, Any]], *, title: str, made: str) -> str:
    """Return the HTML.

    Args:
        runs: of `view_run`, by one order.
        made: when and by what it was made.
    """
    data = {"title": title, "made": made, **_shared_config(runs)}
    page = _asset("page.html")
    parts = {
        "TITLE": html.escape(title, quote=False),
        "STYLE": "\n".join(_asset(name) for name in STYLES),
        "DATA": _json(data),
        # each in an element of its own: a browser that cannot read uPlot's syntax of 2020 reads the others
        "SCRIPT": "</script>\n<script>".join(_asset(name) for name in SCRIPTS),
    }
    for name, text in parts.items():
        before, marker, after = page.partition(f"<!--{name}-->")
        assert marker, name
        page = before + text + after
    return page


def _shared_config(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several runs, what all have alike is stated once."""
    if len(runs) < 2:
        return {"runs": list(runs), "common": {}}
    first = runs[0]["config"]
    common = {k: v for k, v in first.items() if all(k in run["config"] and run["config"][k] == v for run in runs)}
    own = [{**run, "config": {k: v for k, v in run["config"].items() if k not in common}} for run in runs]
    return {"runs": own, "common": common}


def _asset(name: str) -> str:
    return (files("prime_hpc.report") / "assets" / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    try:
        text = _dumps(value)
    except ValueError:  # a number that is not finite
        text = _dumps(with_leaves(value, _finite))
    text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no UTF-8
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=str)


def _finite(value: Any, _: str) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
