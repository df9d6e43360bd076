"""Why a process ended that could report nothing itself: before its `main`, or by a signal of its own making."""

import re

_LABEL = r"^(?:\d+: )?(?:\[\S+\] )?"
"""With which lines of other nodes begin."""
_BEGIN = r"Traceback \(most recent call last\):"
_TRACEBACK = re.compile(
    # the end of one that another process's broke into is not known; nor is a labelled line of its middle its end
    rf"{_LABEL}{_BEGIN}\n(?:{_LABEL}[ \t].*\n)+(?!{_LABEL}(?:[ \t]|{_BEGIN})){_LABEL}(\S.*)$",
    re.MULTILINE,
)
_NATIVE = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (r"^ *what\(\): +(.+)$", r"(\[Rank \d+\] Watchdog caught .+)$", r"^Fatal Python error: (.+)$")
)
_TORCHRUNS_OWN = "torch.distributed.elastic."
_LONGEST = 500


def exception_of(log: str) -> str | None:
    """Return the exception with which a program ended, by the last traceback in its log that is not torchrun's own."""
    told = [str(words) for words in _TRACEBACK.findall(log) if not words.startswith(_TORCHRUNS_OWN)]
    return told[-1][:_LONGEST] if told else None


def native_reason(log: str) -> str | None:
    """Return why native code ended its process, as NCCL's watchdog does after a timeout, by its standard error."""
    found = next((found for pattern in _NATIVE if (found := pattern.findall(log))), None)
    return str(found[0])[:_LONGEST] if found else None
