"""Secrets of the config: keys, tokens, passwords. Masked wherever they are printed, dumped or sent.

Whether a value is a secret is told by its key's name (`names_secret`). In a checked tree it is a `Secret`, whose text
only `reveal()` gives; a dump of the tree holds `***` in its place. The run directory keeps the texts in `secrets/`, one
file a secret, for their owner's eyes alone; `run.yaml` and its like say `@secrets/NAME`, which is the form in which
every source may state a secret: `@FILE`, a file that nobody else can read.
"""

import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.runtime.trees import with_leaves

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

MASK = "***"
FILE_MARK = "@"
"""Begins a value that names the file which holds the secret."""
_MAX_BYTES = 64 * 1024
_LEAST_KNOWN = 4
"""Shorter texts are not looked for in other texts: too much would be taken for them."""

_OF_VARIABLES = re.compile(
    r"(^|_)(API_?KEYS?|KEYS?|TOKEN|SECRETS?|PASSWORD|PASSWD|PASS|PASSPHRASE|CREDENTIALS?|BEARER)(_|$)"
)
_OF_KEYS = re.compile(
    r"(^|_)((api|access|private|secret|auth|signing|encryption|hf|hub|wandb)_?(keys?|token)|bearer|secrets?|password|"
    r"passwd|passphrase|credentials?|webhook)(_|$)"
)
"""Narrower: `answer_key`, `eos_token` are names of columns and tokens."""
_ABOUT = re.compile(r"_(file|path|dir|var|name|url)$", re.I)
"""Endings of what says where a secret is, and is none."""
_URL_WITH_PASSWORD = re.compile(r"(?<=://)[^/@\s:'\"]+:[^/@\s'\"]+(?=@)")
_ASSIGNED = re.compile(r"""(?<![\w$])([A-Za-z_][A-Za-z0-9_-]*)(["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s"',;}\]]+)""")
"""`NAME=value`, `name: value`, `"name": "value"` in any text."""


class Secret:
    """A text that nothing prints. `reveal()` gives it to whoever must have it."""

    __slots__ = ("_text", "file", "problem")

    def __init__(self, text: str, file: Path | None = None, problem: str | None = None) -> None:
        """Hold `text`; `file` is where it was read, `problem` why it could not be."""
        self._text = text
        self.problem = problem
        self.file = file
        if len(text) >= _LEAST_KNOWN:
            _KNOWN.add(text)

    @classmethod
    def stated(cls, value: str) -> "Secret":
        """Return the secret that a source states: its text, or `@FILE`. What is wrong with a file is told when it is
        used."""
        if value == MASK:
            problem = f"{MASK} stands for a secret that was left out: state it again, or as {FILE_MARK}FILE"
            return cls("", problem=problem)
        if not value.startswith(FILE_MARK):
            return cls(value)
        path = Path(value[len(FILE_MARK) :].strip()).expanduser()
        try:
            return cls(read_key_file(path), path)
        except ConfigError as error:
            return cls("", path, str(error))

    def reveal(self) -> str:
        """Return the text itself. Raises ConfigError: it could not be read."""
        if self.problem is not None:
            raise ConfigError(self.problem)
        return self._text

    def __repr__(self) -> str:
        return MASK

    __str__ = __repr__

    def __bool__(self) -> bool:
        return bool(self._text) or self.problem is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and (self._text, self.problem) == (other._text, other.problem)

    def __hash__(self) -> int:
        return hash((self._text, self.problem))

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (self._text, self.file, self.problem)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> "CoreSchema":
        from pydantic_core import PydanticCustomError, core_schema

        def check(value: Any) -> Secret:
            if isinstance(value, Secret):
                return value
            if not isinstance(value, str):
                raise PydanticCustomError("string_type", "Input should be a valid string")
            return cls.stated(value)

        return core_schema.no_info_plain_validator_function(
            check, serialization=core_schema.plain_serializer_function_ser_schema(lambda _: MASK)
        )


_KNOWN: set[str] = set()
"""Texts of this process's secrets, which `masked` finds in any other text."""


def read_key_file(path: Path) -> str:
    """Return the secret in a file: its text without the line break at its end.
    Raises ConfigError: it cannot be read, is empty, or somebody else can read or change it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; it was to hold a secret") from error
    try:
        _refuse_if_open_to_others(path, os.fstat(descriptor))
        content = os.read(descriptor, _MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        text = content.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: holds no text") from error
    if not text or len(content) > _MAX_BYTES or "\0" in text:
        what = "is empty" if not text else "is too long, or no text, to be a secret"
        raise ConfigError(f"{path}: {what}")
    return text


def _refuse_if_open_to_others(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(f"{path}: is no ordinary file; a secret is read from one")
    if about.st_uid != os.geteuid():
        raise ConfigError(
            f"{path}: belongs to another user (uid {about.st_uid}), who could change it; a secret is read from a file "
            f"of your own: cp {shlex.quote(str(path))} YOURS && chmod 600 YOURS"
        )
    if about.st_mode & 0o077:
        raise ConfigError(
            f"{path}: others can read or change it (mode {stat.S_IMODE(about.st_mode):04o}); a secret is read from a "
            f"file for your eyes alone: chmod 600 {shlex.quote(str(path))}"
        )


# --------------------------------------------------------------------------------------------------- what is a secret


def names_secret(name: str) -> bool:
    """Return whether a key or an environment variable of this name holds a secret: `api_key`, `WANDB_API_KEY`,
    `HF_TOKEN`."""
    name = name.replace("-", "_")
    if _ABOUT.search(name):
        return False
    return bool((_OF_VARIABLES if name.isupper() else _OF_KEYS).search(name))


def is_secret(name: str, value: Any) -> bool:
    """Return whether a stated value is a secret, by its key's name, or as an address with a password in it."""
    return isinstance(value, str) and bool(value) and (names_secret(name) or bool(_URL_WITH_PASSWORD.search(value)))


def hide(value: Any, name: str = "", make: Callable[[str], "Secret"] = Secret.stated) -> Any:
    """Return a plain value with its secrets as `Secret`s, those of mappings and lists in it too. `make`: from a text;
    `Secret` where that is the secret itself, whatever it begins with."""
    return with_leaves(value, lambda leaf, key: make(leaf) if is_secret(key, leaf) else leaf, name)


def revealed(value: Any) -> Any:
    """Return a value with the texts of its secrets: for whoever must hand it on."""
    return with_leaves(value, lambda leaf, _: leaf.reveal() if isinstance(leaf, Secret) else leaf)


def _hidden_mapping(value: dict[str, Any]) -> dict[str, Any]:
    hidden = hide(value)
    assert isinstance(hidden, dict)
    return hidden


def _free_mapping() -> Any:
    from pydantic import AfterValidator, PlainSerializer

    def dumped(value: Any) -> Any:
        return with_leaves(value, lambda leaf, _: MASK if isinstance(leaf, Secret) else leaf)

    return AfterValidator(_hidden_mapping), PlainSerializer(dumped)


if TYPE_CHECKING:
    Arguments = dict[str, Any]
    Variables = dict[str, str | Secret]
else:
    _AFTER, _DUMP = _free_mapping()
    Arguments = Annotated[dict[str, Any], _AFTER, _DUMP]
    """A mapping of any keys; its secrets are `Secret`s, `revealed` gives them."""
    Variables = Annotated[dict[str, str], _AFTER, _DUMP]
    """Environment variables, texts when they are stated; the values of secrets are `Secret`s."""


def secrets_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Secret]]:
    """Every secret of a checked section (or of a mapping or list in it), with its path."""
    if isinstance(value, Secret):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from secrets_of(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from secrets_of(inner, (*path, str(index)))
    elif hasattr(type(value), "model_fields"):
        for name in type(value).model_fields:
            yield from secrets_of(getattr(value, name), (*path, name))


# ------------------------------------------------------------------------------------------------------ plain trees


def anchored(tree: Any, folder: Path, name: str = "") -> Any:
    """Return a plain tree whose `@FILE`s are absolute; they were meant from `folder`. One that holds a `${...}` stays
    as it is until that is resolved."""

    def from_the_root(leaf: Any, key: str) -> Any:
        if isinstance(leaf, str) and leaf[:1] == FILE_MARK and leaf[1:] and "${" not in leaf and names_secret(key):
            return f"{FILE_MARK}{(folder / Path(leaf[1:].strip()).expanduser()).absolute()}"
        return leaf

    return with_leaves(tree, from_the_root, name)


def taken_out(tree: Any, prefix: str = "", name: str = "") -> tuple[Any, dict[str, str]]:
    """Return a plain tree with each secret that it holds replaced by `@secrets/PATH`, and those secrets by PATH.

    `@FILE`s and `${...}` stay as they are: they hold none.
    """
    found: dict[str, str] = {}
    if isinstance(tree, dict | list):
        pairs: list[tuple[Any, Any]] = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
        inner = {key: taken_out(value, f"{prefix}{key}.", str(key)) for key, value in pairs}
        for _, secrets in inner.values():
            found |= secrets
        if isinstance(tree, list):
            return [inner[key][0] for key, _ in pairs], found
        return {key: value for key, (value, _) in inner.items()}, found
    if is_secret(name, tree) and not tree.startswith(FILE_MARK) and "${" not in tree:
        key = file_name(prefix.rstrip("."))
        return f"{FILE_MARK}{SECRETS}/{key}", {key: tree}
    return tree, found


def put_back(
    tree: dict[str, Any], section: Any, above: str = "", prefix: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a dump of a section with `@<above>secrets/PATH` in the place of each mask, and the texts by PATH.
    Raises ConfigError: the text of a secret is not known."""
    texts: dict[str, str] = {}
    for path, secret in secrets_of(section):
        here: Any = tree
        for step in path[:-1]:
            here = here[int(step) if isinstance(here, list) else step]
        last: Any = int(path[-1]) if isinstance(here, list) else path[-1]
        if last not in here and isinstance(here, dict):
            continue  # a dump without defaults
        if not secret and secret.problem is None:
            here[last] = ""
            continue
        name = prefix + file_name(".".join(path))
        try:
            texts[name] = secret.reveal()
        except ConfigError as error:
            raise ConfigError(str(error), ".".join(path)) from error
        here[last] = f"{FILE_MARK}{above}{SECRETS}/{name}"
    return tree, texts


SECRETS = "secrets"
"""Directory of a run (or a sweep) that holds them."""
OF_SITE = "site."
"""Begins the names of a site profile's, which are written apart from the experiment's."""


def file_name(dotted: str) -> str:
    """Name of the file that holds the secret of a key."""
    return re.sub(r"[^\w.-]", "_", dotted)


@contextmanager
def written_secrets(folder: Path, texts: Mapping[str, str], keep: str = "", only: str = "") -> Iterator[None]:
    """Write `folder/secrets/NAME` for each text, readable by its owner alone from the start, before the body, which
    writes the file that names them; the others are removed after it: until then the file as it was names those.

    Args:
        keep: beginning of the names of those that are not removed.
        only: beginning of the names of those that may be.

    Raises:
        OSError: it cannot be written.
    """
    home = folder / SECRETS
    if texts:
        home.mkdir(mode=0o700, exist_ok=True)
        home.chmod(0o700)
    for name, text in texts.items():
        write_atomic(home / name, text, mode=0o600)
    yield
    for path in home.iterdir() if home.is_dir() else ():
        if path.name not in texts and path.name.startswith(only) and not (keep and path.name.startswith(keep)):
            path.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------------- texts


def without_known(text: str) -> str:
    """Return a text in which no secret of this process stands; all else is as it was."""
    for known in sorted(_KNOWN, key=len, reverse=True):
        text = text.replace(known, MASK).replace(json.dumps(known)[1:-1], MASK)
    return text


def masked(text: str) -> str:
    """Return a text for others' eyes: no secret of this process, and no value that stands behind a secret's name."""
    text = _URL_WITH_PASSWORD.sub(MASK, without_known(text))

    def without(found: re.Match[str]) -> str:
        name, between, value = found.groups()
        if not names_secret(name) or value.strip("'\"").startswith((FILE_MARK, "$", MASK)):
            return found[0]
        quote = value[0] if value[0] in "'\"" else ""
        return f"{name}{between}{quote}{MASK}{quote}"

    return _ASSIGNED.sub(without, text)


def masked_command(command: list[str]) -> list[str]:
    """Return a command line for others' eyes."""
    shown: list[str] = []
    hide_next = False
    for token in command:
        is_flag = token.startswith("--")
        name, equals, value = token.partition("=") if is_flag else ("", "", token)
        if hide_next and not is_flag:
            shown.append(token if token.startswith(FILE_MARK) else MASK)
        elif is_flag and equals and is_secret(_last(name), value):
            shown.append(token if value.startswith(FILE_MARK) else f"{name}={MASK}")
        else:
            shown.append(masked(token))
        hide_next = is_flag and not equals and names_secret(_last(name))
    return shown


def command_without_secrets(command: list[str]) -> tuple[list[str], list[str]]:
    """Return a command line without the flags whose values hold secrets, and those flags' names."""
    kept: list[str] = []
    dropped: list[str] = []
    shown = masked_command(command)
    for place, (token, safe) in enumerate(zip(command, shown, strict=True)):
        if token == safe:
            kept.append(token)
            continue
        is_value = not token.startswith("--") and place and command[place - 1].startswith("--")
        if is_value:  # its flag goes too
            dropped.append(kept.pop())
        else:
            dropped.append(token.partition("=")[0])
    return kept, dropped


def _last(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").rpartition(".")[2]


def plainly_assigned(text: str) -> str | None:
    """Name of a variable that a shell line or an argument gives a secret in plain text; None: there is none."""
    for name, between, value in _ASSIGNED.findall(text):
        bare = value.strip("'\"")
        if "=" in between and names_secret(name) and bare and not bare.startswith(("$", "`", FILE_MARK, "(", MASK)):
            return str(name)
    return None
