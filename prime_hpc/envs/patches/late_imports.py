"""verifiers without what few environments use: Anthropic's SDK, math-verify with its sympy, MCP, all bundled members.

`import verifiers.v1` and the first look-up of an environment take them in: two thirds of 5,500 modules and half of the
time, which every orchestrator, evaluation and host of environments pays at its start, most where packages lie on a
shared file system. Each comes when something of it is used. Installed by `import prime_hpc.envs`, before verifiers is.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ANTHROPIC = "verifiers.v1.dialects.anthropic"
"""Its dialect subclasses the SDK's models."""
BUNDLED = ("verifiers.v1.tasksets", "verifiers.v1.harnesses")
"""Packages whose members are looked up by name, each of which imports all of them."""
SCORE = "verifiers.v1.utils.score"
MATH = "math_verify"


def install() -> None:
    """Idempotent. Without effect on what was imported before."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the modules that are not imported as they stand."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of one of ours; None for all others."""
        if name not in LOADERS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            spec.loader = LOADERS[name](spec.loader)
        return spec


class _Wrapped(Loader):
    """A loader that has another one do most of it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:  # `get_source` and the like, which tracebacks ask for
        return getattr(self._loader, name)


class _LateLoader(_Wrapped):
    """Runs a module when something of it is asked for that is not there yet."""

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing yet."""
        late = _Late(module, self._loader)
        vars(module).update(__getattr__=late.find, __dir__=late.names)


class _Late:
    """A module that is not run yet. Threads that ask meanwhile wait for the one that runs it."""

    def __init__(self, module: ModuleType, loader: Any) -> None:
        self._module, self._loader = module, loader
        self._lock = threading.RLock()
        self._is_begun = False
        """For the thread that has the lock: what a module asks of itself while it runs, it has or has not."""

    def run(self) -> None:
        """Run it once. One that fails is as it was: the next that asks is told the same."""
        with self._lock:
            names = vars(self._module)
            if self._is_begun or names.get("__getattr__") != self.find:
                return
            self._is_begun = True
            try:
                self._loader.exec_module(self._module)
            finally:
                self._is_begun = False
            for name, own in (("__getattr__", self.find), ("__dir__", self.names)):
                if names.get(name) == own:  # no other one of the module itself
                    del names[name]

    def find(self, name: str) -> Any:
        """`__getattr__`. Of double underscores only `__all__` makes it run: the import system asks for others."""
        if name == "__all__" or not name.startswith("__"):
            self.run()
            if name in vars(self._module) or vars(self._module).get("__getattr__") != self.find:
                return getattr(self._module, name)
        raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")

    def names(self) -> list[str]:
        """`__dir__`."""
        self.run()
        return sorted(vars(self._module))


class _DialectLoader(_LateLoader):
    """Has a `_LateDialect` there until the module is run."""

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing yet."""
        super().exec_module(module)
        find = vars(module)["__getattr__"]

        def real() -> type:
            if vars(module)["AnthropicDialect"] is late:
                find("ModdedUsage")  # any name: all are there afterwards
                vars(sys.modules[module.__name__.rpartition(".")[0]])["AnthropicDialect"] = module.AnthropicDialect
            found: type = module.AnthropicDialect
            return found

        late = vars(module)["AnthropicDialect"] = _LateDialect(real)


class _LateDialect:
    """Stands for a class until it is used: to make an object, which is as late, to subclass, to compare types."""

    def __init__(self, real: Callable[[], type]) -> None:
        self._real = real

    def __call__(self) -> "_LateObject":
        return _LateObject(self._real)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._real(),)

    def __instancecheck__(self, other: object) -> bool:
        return isinstance(other, self._real())

    def __subclasscheck__(self, other: type) -> bool:
        return issubclass(other, self._real())

    def __or__(self, other: Any) -> Any:
        return self._real() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._real()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


class _LateObject:
    """Stands for an object of a class, which is made when something of it is asked for."""

    def __init__(self, real: Callable[[], type]) -> None:
        self._real = real
        self._made: Any = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what `isinstance` asks
        return self._real()

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._real()()
        return getattr(self._made, name)


class _Through(BaseException):
    """Carries an error through verifiers' function, which takes every `Exception` for an answer that cannot be read."""


class _ScoreLoader(_Wrapped):
    """Runs verifiers' scoring functions with a math-verify that compares in a process that can be killed."""

    def exec_module(self, module: ModuleType) -> None:
        """Run it with a math-verify of two functions and a class, of which only the comparison does anything."""

        def verify(gold: str, found: str, **_: Any) -> bool:
            try:
                same: bool = importlib.import_module("prime_hpc.envs.math_answers").same_boxed(gold, found)
            except Exception as error:  # of the machinery: no answer is wrong for that
                raise _Through from error
            return same

        stand_in, errors = ModuleType(MATH), ModuleType(f"{MATH}.errors")
        vars(stand_in).update(parse=lambda text, **_: text, verify=verify, errors=errors)
        vars(errors)["TimeoutException"] = TimeoutError  # nothing raises it
        real = {name: sys.modules.get(name) for name in (MATH, errors.__name__)}
        try:
            sys.modules.update({MATH: stand_in, errors.__name__: errors})
            self._loader.exec_module(module)
        finally:
            for name, known in real.items():
                del sys.modules[name]
                if known is not None:
                    sys.modules[name] = known
        own = module.verify_boxed_math_answer

        @functools.wraps(own)
        def verify_boxed_math_answer(*args: Any, **kwargs: Any) -> float:
            try:
                score: float = own(*args, **kwargs)
            except _Through as through:
                assert through.__cause__ is not None
                raise through.__cause__ from None
            return score

        vars(module)["verify_boxed_math_answer"] = verify_boxed_math_answer


class _MathLoader(_Wrapped):
    """Has math-verify keep its deadlines on every thread."""

    def exec_module(self, module: ModuleType) -> None:
        """Run it and replace its deadlines."""
        self._loader.exec_module(module)
        importlib.import_module("prime_hpc.envs.patches.math_deadlines").use_on_threads()


LOADERS: dict[str, Callable[[Any], Loader]] = {
    ANTHROPIC: _DialectLoader,
    SCORE: _ScoreLoader,
    MATH: _MathLoader,
    **dict.fromkeys(BUNDLED, _LateLoader),
}
