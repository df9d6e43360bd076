"""wordle: find a five-letter word in six guesses; each guess is answered letter by letter. Several turns.

The environment plays the user. `G` is the right letter at the right place, `Y` a letter of the word at another place,
`X` neither. The words are common English ones, listed here.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

from prime_hpc.envs.lazy_runtime import LazyBox
from prime_hpc.envs.tasksets.generated import GeneratedConfig, OneSeatConfig
from prime_hpc.envs.tasksets.reverse_text_data import split_of

__all__ = ["WordleEnv", "WordleTaskset"]

_WORD_LIST = """
about above actor acute adopt adult after again agent agree ahead alarm album alert alike alive allow alone along
alter among anger angle angry apart apple apply arena argue arise array aside asset audio avoid award aware badly
baker basic beach begin being below bench birth black blade blame blank blast blend bless blind block blood board
boost bound brain brand brave bread break breed brick brief bring broad brown brush build bunch cabin cable candy
carry catch cause chain chair chalk charm chart chase cheap check cheek cheer chess chest chief child china choir
chose civic civil claim class clean clear clerk climb clock close cloth cloud coach coast could count court cover
craft crane crash cream crime cross crowd crown crude curve cycle daily dairy dance death debut delay depth devil
diary dirty doubt dozen draft drain drama dream dress drift drill drink drive eager early earth eight elbow elder
elect elite empty enemy enjoy enter entry equal error essay event every exact exist extra faint faith false fancy
fault favor feast fence fever fiber field fifth fifty fight final first flame flash fleet flesh float flood floor
flour fluid focus force forty found frame fresh front frost fruit funny ghost giant given glass globe glory glove
grace grade grain grand grant grape grass grave great green greet grief gross group guard guess guest guide habit
happy harsh heart heavy hello hobby honey honor horse hotel house human humor ideal image imply index inner input
issue ivory jeans jewel joint judge juice known label labor large laser later laugh layer learn least leave lemon
level light limit linen liver local logic loose lover lower loyal lucky lunch magic major maker maple march match
maybe mayor medal media mercy merit metal meter midst might minor minus mixed model money month moral motor mount
mouse mouth movie music naked nerve never newly night noble noise north novel nurse ocean offer often olive onion
opera orbit order organ other ought outer owner paint panel panic paper party pasta patch pause peace pearl penny
phase phone photo piano piece pilot pitch place plain plane plant plate plaza point porch pound power press price
pride prime print prior prize proof proud prove pulse pupil queen query quick quiet quite quote radar radio raise
range rapid ratio reach ready realm rebel refer relax reply rider ridge rifle right rigid risky rival river roast
robot rocky rough round route royal rural salad scale scene scent scope score scout serve seven shade shake shall
shame shape share shark sharp sheep sheet shelf shell shift shine shirt shock shore short shout shown sight silly
since skill skirt sleep slice slide slope small smart smell smile smoke snake solid solve sorry sound south space
spare spark speak speed spell spend spice spine split spoke sport staff stage stair stake stand stare start state
steam steel steep stick stiff still stock stone store storm story stove straw strip study stuff style sugar suite
sunny super swear sweat sweep sweet swift swing sword table taste teach thank theme there thick thief thing think
third those three throw thumb tiger tight timer tired title toast today token tooth topic total touch tough tower
toxic trace track trade trail train trait trash treat trend trial tribe trick troop truck truly trunk trust truth
twice twist ultra uncle under union unite unity until upper upset urban usage usual valid value valve vapor video
virus visit vital vivid vocal voice voter wagon waist waste watch water weary weigh whale wheat wheel where which
while white whole whose woman world worry worse worst worth wound wrist write wrong yacht yield young youth
"""
WORDS: tuple[str, ...] = tuple(_WORD_LIST.split())
LENGTH = 5
_TAGGED = re.compile(r"<guess>\s*([A-Za-z]+)\s*</guess>")
_WORD = re.compile(r"\b[A-Za-z]{5}\b")
INSTRUCTIONS = (
    "Find a common English word of five letters. Reply with one word inside <guess></guess>. After each guess you see, "
    "for each of its letters, G (right place), Y (elsewhere in the word) or X (not in the word)."
)


def guess_in(reply: str) -> str | None:
    """Return a reply's guess in lower case: its last tagged word, else its last word of five letters."""
    found = _TAGGED.findall(reply) or _WORD.findall(reply)
    return found[-1].lower() if found else None


def judge(guess: str, secret: str) -> str:
    """Answer a guess with G, Y and X; a letter is Y at most as often as the secret has it left."""
    left = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    marks = []
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            marks.append("G")
        elif left[g] > 0:
            left[g] -= 1
            marks.append("Y")
        else:
            marks.append("X")
    return "".join(marks)


class WordleData(vf.TaskData):
    """One word to find."""

    secret: str
    max_guesses: int


class WordleTask(vf.Task[WordleData]):
    """Scores the game that the environment recorded."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """Found: 1 for the first guess down to 0.5 for the last; not found: 0.2 times the best guess's share of G."""
        guesses = trace.info.get("guesses_to_find")
        if guesses is not None:
            return 1.0 - 0.5 * (guesses - 1) / max(1, self.data.max_guesses - 1)
        return 0.2 * max((marks.count("G") / LENGTH for marks in trace.info.get("marks", ())), default=0.0)

    @vf.metric
    async def solved(self, trace: vf.Trace) -> float:
        """1 when found."""
        return float(trace.info.get("guesses_to_find") is not None)


class WordleConfig(GeneratedConfig):
    """Arguments of `wordle`."""

    num_tasks: int = 2000
    """How many games; a word may come again."""
    max_guesses: int = 6
    """Guesses a game allows."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt."""


class WordleTaskset(vf.Taskset[WordleTask, WordleConfig]):
    """Games over the split's words."""

    def load(self) -> Iterable[WordleTask]:
        """Games, in the seed's order."""
        config = self.config
        if config.max_guesses < 1:
            raise ValueError("wordle needs max_guesses >= 1")
        words = [word for word in WORDS if split_of(word) == config.split]
        rng = random.Random(f"wordle:{config.split}:{config.seed}")
        rng.shuffle(words)
        for number in range(config.num_tasks):
            data = WordleData(
                prompt="Your first guess?",
                system_prompt=config.instructions,
                secret=words[number % len(words)],
                max_guesses=config.max_guesses,
            )
            yield WordleTask(data, config.task)


class WordleEnv(vf.Env[OneSeatConfig]):
    """Plays the user who knows the word."""

    async def run(self, task: Any, agents: Any) -> None:
        """One game; a reply without a guess of five letters costs one."""
        async with LazyBox() as box, agents.agent.interaction(task, runtime=box) as game:
            marks: list[str] = []
            game.trace.info["marks"] = marks
            segment = await game.turn()
            for number in range(1, task.data.max_guesses + 1):
                if segment.terminated:
                    return
                guess = guess_in(segment.last_reply)
                if guess == task.data.secret:
                    game.trace.info["guesses_to_find"] = number
                    return
                if guess is not None and len(guess) == LENGTH:
                    marks.append(judge(guess, task.data.secret))
                    answer = f"{guess}: {' '.join(marks[-1])}"
                else:
                    answer = "That is no word of five letters."
                if number < task.data.max_guesses:
                    segment = await game.turn(answer)
