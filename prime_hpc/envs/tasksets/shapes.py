"""shapes: a picture, and a question of one word or number about it. One turn; for models that see images.

Pictures are drawn from the seed: a shape of some colour somewhere, or some dots. They need no data, and a small model
learns them within a few hundred steps.
"""

import io
import random
import re
from collections.abc import Iterable
from typing import Any, Literal

import verifiers.v1 as vf
from PIL import Image, ImageDraw

from prime_hpc.envs.images import encode_image
from prime_hpc.envs.tasksets.generated import GeneratedConfig, drawn

__all__ = ["ShapesTaskset"]

INSTRUCTIONS = "Answer with one word or number."
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
    "purple": (140, 50, 170),
}
FORMS = ("circle", "square", "triangle")
QUESTIONS = {"colour": "What colour is the shape?", "form": "Which shape is it?", "count": "How many dots are there?"}
ACROSS = 4
"""Dots stand in a grid of so many by so many places."""

Kind = Literal["colour", "form", "count"]


class ShapesData(vf.TaskData):
    """One picture."""

    answer: str
    choices: list[str]
    """Answers that the question may have."""


class ShapesTask(vf.Task[ShapesData]):
    """Scores the last reply."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 where the reply names the right answer and no other one."""
        return float(named(trace.last_reply, self.data.choices) == {self.data.answer})

    @vf.metric
    async def answered(self, trace: vf.Trace) -> float:
        """1 where it names an answer at all."""
        return float(bool(named(trace.last_reply, self.data.choices)))


class ShapesConfig(GeneratedConfig):
    """Arguments of `shapes`."""

    kinds: list[Kind] = ["colour", "count"]
    """Questions: `colour` and `form` of a shape, `count` of dots."""
    size: int = 64
    """Width and height of a picture, in pixels."""
    max_count: int = 5
    """Most dots."""
    num_colours: int = 6
    """How many colours there are, of red, green, blue, yellow, black, purple."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt; none: the chat template's own, where it has one."""


def named(reply: str, choices: Iterable[str]) -> set[str]:
    """Return those of the choices that a reply names, its reasoning left out."""
    said = set(re.findall(r"[a-z]+|\d+", reply.rpartition("</think>")[2].lower()))
    return said & set(choices)


class ShapesTaskset(vf.Taskset[ShapesTask, ShapesConfig]):
    """Pictures on white."""

    def load(self) -> Iterable[ShapesTask]:
        """Return the split's pictures, in the seed's order; the same one may come twice.
        Raises ValueError: the arguments allow no picture."""
        config = self.config
        if not 16 <= config.size <= 4096 or not 1 <= config.max_count <= ACROSS**2 or not config.kinds:
            raise ValueError(f"shapes needs 16 <= size <= 4096, 1 <= max_count <= {ACROSS**2} and some `kinds`")
        if not 2 <= config.num_colours <= len(COLOURS):
            raise ValueError(f"shapes knows 2 to {len(COLOURS)} colours, not {config.num_colours}")
        colours = list(COLOURS)[: config.num_colours]

        def draw(rng: random.Random) -> tuple[str, Any]:
            kind, form, colour = rng.choice(config.kinds), rng.choice(FORMS), rng.choice(colours)
            count = rng.randint(1, config.max_count)
            side = rng.randint(config.size // 4, config.size // 2)
            corner = (rng.randint(0, config.size - side), rng.randint(0, config.size - side))
            places = sorted(rng.sample(range(ACROSS**2), count))
            found = (kind, colour, places) if kind == "count" else (kind, colour, form, side, corner)
            return f"{config.size} {found}", found

        for kind, colour, *rest in drawn("shapes", config, draw):
            picture = dots(config.size, colour, *rest) if kind == "count" else shape(config.size, colour, *rest)
            answers = {"colour": colour, "form": rest[0], "count": str(len(rest[0]))}
            numbers = [str(number) for number in range(ACROSS**2 + 1)]
            data = ShapesData(
                prompt=[vf.UserMessage(content=_content(picture, QUESTIONS[kind]))],
                system_prompt=config.instructions,
                answer=answers[kind],
                choices={"colour": list(COLOURS), "form": list(FORMS), "count": numbers}[kind],
            )
            yield ShapesTask(data, config.task)


def shape(size: int, colour: str, form: str, side: int, corner: tuple[int, int]) -> Image.Image:
    """Return a picture of one shape."""
    picture = Image.new("RGB", (size, size), "white")
    (x, y), pen = corner, ImageDraw.Draw(picture)
    if form == "circle":
        pen.ellipse((x, y, x + side - 1, y + side - 1), COLOURS[colour])
    elif form == "square":
        pen.rectangle((x, y, x + side - 1, y + side - 1), COLOURS[colour])
    else:
        pen.polygon([(x + side // 2, y), (x, y + side - 1), (x + side - 1, y + side - 1)], COLOURS[colour])
    return picture


def dots(size: int, colour: str, places: Iterable[int]) -> Image.Image:
    """Return a picture with a dot in each of these places of the grid."""
    picture = Image.new("RGB", (size, size), "white")
    pen, step = ImageDraw.Draw(picture), size / ACROSS
    for place in places:
        x, y = (place % ACROSS + 0.2) * step, (place // ACROSS + 0.2) * step
        pen.ellipse((x, y, x + 0.6 * step, y + 0.6 * step), COLOURS[colour])
    return picture


def _content(picture: Image.Image, question: str) -> Any:
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = encode_image(file.getvalue())
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
