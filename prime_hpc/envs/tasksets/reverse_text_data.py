"""The reverse-text task itself: texts, prompts and scores, without verifiers; and the split of a text, a fixed property
of it, which all tasksets share that make their tasks.

`prime_hpc.envs.tasksets.reverse_text` wraps it for verifiers; the starter tool makes warm-up demonstrations from
the `train` texts. Everything is a pure function of its arguments, the same on every machine.
"""

import hashlib
import random
from difflib import SequenceMatcher
from typing import Literal

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")
EVAL_SHARE = 5
"""One text in so many belongs to the eval split."""

_WORD_LIST = """
able acid also area army away baby back ball band bank base bath bear beat bell belt best bike bird blue boat
body bone book born both bowl boy bread brick busy cake call calm camp card care case cat cave chair city clay
clean clock cloud coal coat code cold cook cool copy corn cost crab crop cup dark date dawn day deal deep deer
desk dish dog door down draw dream dress drop dry duck dust each early earth east easy edge egg else end even
ever face fact fair fall farm fast fear feed field fig fine fire fish five flag flat flow fog fold food foot
forest fork form four fox free fresh frog from fruit full game garden gate gift girl give glad glass goat gold
good grain grass gray green group grow half hall hand happy hard hat have hawk head heat help here high hill
home honey hope horse hour house ice idea inch ink iron island jar join joy jump just keep key kind king kite
knee knot lake lamp land large last late lead leaf left lemon less life lift light like lime line lion list
long look loud love low luck lunch made mail main make map mark meal meat melon metal mile milk mill mind mint
mix moon more moss most mouse much music nail name near neck nest net never new nice night nine north nose note
oak ocean off oil old one only open orange other oven owl own page paint pair palm paper park part past path
pear pen piano pig pine pink place plan plant play plum pond pool post potato queen quick quiet rain read red
rest rice rich ride right ring river road rock roof room root rope rose round rule run safe sail salt same sand
school sea seat seed ship shoe shop short silk silver six sky sleep slow small snow soap soft soil song soup
south spoon star stone storm street sugar summer sun table tail talk tall tea ten tent thin three tiger time
tiny tool town train tree turn two use vase very view village voice wait walk wall warm wash water wave way
week west wheat wheel white wide wild wind wine wing winter wolf wood wool word work world yard year yellow zoo
"""
WORDS: tuple[str, ...] = tuple(_WORD_LIST.split())


def split_of(text: str) -> Split:
    """Return the split of a text, whatever the seed that drew it."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % EVAL_SHARE == 0 else "train"


def make_texts(
    split: Split,
    seed: int,
    num: int,
    *,
    min_chars: int = 6,
    max_chars: int = 16,
    min_words: int = 2,
    max_words: int = 3,
) -> list[str]:
    """`num` distinct texts of the split, each `min_words`..`max_words` lower-case words joined by one space.

    The first k texts do not depend on `num`. No text of one split can occur in the other.
    Raises ValueError: an unknown split, impossible bounds, or bounds that allow fewer than `num` distinct texts.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; it is one of {', '.join(SPLITS)}")
    if not (0 < min_words <= max_words and 0 < min_chars <= max_chars):
        raise ValueError(
            f"the bounds must be 0 < min <= max; got words {min_words}..{max_words}, chars {min_chars}..{max_chars}"
        )
    if num < 0:
        raise ValueError(f"num is {num}; it must not be negative")
    rng = random.Random(f"reverse-text:{split}:{seed}")
    texts: dict[str, None] = {}
    misses = 0
    while len(texts) < num:
        text = " ".join(rng.choices(WORDS, k=rng.randint(min_words, max_words)))
        if min_chars <= len(text) <= max_chars and split_of(text) == split and text not in texts:
            texts[text] = None
            misses = 0
            continue
        misses += 1
        if misses > 20_000:  # a fresh text is nowhere near so rare unless the bounds leave next to none
            raise ValueError(
                f"found only {len(texts)} of {num} distinct {split} texts with {min_words}..{max_words} words and "
                f"{min_chars}..{max_chars} characters: widen the bounds or ask for fewer"
            )
    return list(texts)


def answer_of(text: str) -> str:
    """Return the right reply: the text's characters in reverse order."""
    return text[::-1]


def build_prompt(text: str) -> list[dict[str, str]]:
    """Return the chat messages that pose the task: the text alone, as the user's message."""
    return [{"role": "user", "content": text}]


def score(reply: str, text: str) -> float:
    """Similarity in [0, 1] of the reply (outer white space ignored) to the reversed text; 1 only when equal."""
    return SequenceMatcher(None, reply.strip(), answer_of(text), autojunk=False).ratio()
