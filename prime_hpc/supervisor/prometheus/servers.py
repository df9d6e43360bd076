"""Servers' own figures, as vLLM and our small backend write them, with the labels `run` and `server`, as one text."""

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+([^ \t]+)(?:[ \t]+-?\d+)?")
_ABOUT = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.*)")
_TAKEN = re.compile(r"(?:^|,)\s*(run|server)=")
_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created")


def merge(texts: Mapping[str, str], run: str) -> str:
    """Return the texts of several servers as one, in which every family stands once.

    Lines that are none of Prometheus' form are left out, and `_created` times, which double the number of series.
    `texts`: by the server's label, e.g. `inference[0]`.
    """
    about: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for server, text in texts.items():
        own = f'run="{escape(run)}",server="{escape(server)}"'
        for line in text.splitlines():
            if found := _ABOUT.fullmatch(line):
                if not found[2].endswith("_created"):
                    about.setdefault(found[2], {}).setdefault(found[1], found[3])
            elif (found := _SAMPLE.fullmatch(line.rstrip())) and not found[1].endswith("_created"):
                labels = (found[2] or "").strip().rstrip(",")
                if _TAKEN.search(labels):
                    continue
                family = _family(found[1], about)
                labels = f"{own},{labels}" if labels else own
                samples.setdefault(family, []).append(f"{found[1]}{{{labels}}} {found[3]}")
    lines: list[str] = []
    for family, found_samples in samples.items():
        lines += [f"# {word} {family} {rest}" for word, rest in sorted(about.get(family, {}).items())]
        lines += found_samples
    return "\n".join([*lines, ""]) if lines else ""


def _family(name: str, about: Mapping[str, object]) -> str:
    if name in about:
        return name
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name.removesuffix(suffix) in about:
            return name.removesuffix(suffix)
    return name


def escape(value: str) -> str:
    """Return a label's value as it stands between quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
