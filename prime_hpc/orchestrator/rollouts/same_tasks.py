"""Notices that a resumed run has other tasks than it had: prompts are numbers, and would name those without a word."""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from loguru import logger

from prime_hpc.envs.held_out import content

LOOKED_AT = 32
"""Tasks of an environment, evenly spaced: of data that was made anew hardly one is the same."""


def digests(sources: Sequence[Any]) -> dict[str, str]:
    """Return a sum over the content of some tasks of each environment, by its name; of endless ones, and of those whose
    tasks cannot be made or written here, none."""
    found = {}
    for source in sources:
        try:
            count = source.num_tasks or 0
            picked = sorted({number * count // LOOKED_AT for number in range(LOOKED_AT)}) if count else []
            texts = [content(source.task(index)) for index in picked]
        except Exception as error:  # noqa: BLE001 - a taskset's code: the episode that needs the task says why
            logger.debug(f"{source.name}: whether a resumed run has the same tasks cannot be told: {error}")
            continue
        if texts:
            found[source.name] = xxhash.xxh3_64_hexdigest("\0".join(texts).encode(errors="surrogatepass"))
    return found


def warn_of_others(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Say which environments have other tasks than when the state was stored."""
    names = [name for name, digest in now.items() if then.get(name, digest) != digest]
    if names:
        logger.warning(
            f"{', '.join(names)}: as many tasks as when the checkpoint was written, but not the same ones (the data, "
            "its order, or how prompts are made of it): the run goes on with them, and some that it has seen may come "
            "again"
        )
