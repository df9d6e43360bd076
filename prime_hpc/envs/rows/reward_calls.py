"""The names by which reward functions of `rows` are called, and what a function asks for beyond them: as an imported
one says, or as it is written."""

import ast
import inspect
from collections.abc import Iterable
from inspect import Parameter, Signature

TEXT = ("completion", "response", "solution_str")
_MADE = (*TEXT, "answer", "ground_truth", "prompt", "messages", "row")
_PLURAL = ("completions", "queries", "prompts", "labels")
_OPEN = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)


def is_plural(signature: Signature) -> bool:
    """Return whether a function takes lists, as TRL and OpenRLHF have it."""
    return not {"completions", "queries"}.isdisjoint(signature.parameters)


def wrong_call(name: str, signature: Signature, columns: Iterable[str]) -> str | None:
    """Say that a reward function needs what no reply has, or does not say what it needs; None: it can be called.
    `columns`: of the rows."""
    known = {*columns, *(_PLURAL if is_plural(signature) else _MADE)}
    parameters = signature.parameters.values()
    if {p.kind for p in parameters} == set(_OPEN):
        return (
            f"reward {name!r} takes *args and **kwargs, which do not say how it is to be called: put "
            "@functools.wraps(function) on the wrapper within its decorator"
        )
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in _OPEN]
    if missing := [name for name in needed if name not in known]:
        return f"reward {name!r} takes {', '.join(missing)}, which no reply has; there are: {', '.join(sorted(known))}"
    return None


def written_signature(tree: ast.Module, name: str) -> Signature | None:
    """Return the parameters of a module's function from its source; None where that does not tell: it is decorated, or
    the name is bound elsewhere too."""
    function = _bound(tree, name)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.decorator_list:
        return None
    return _signature(function.args) if function in tree.body else None


def is_class(tree: ast.Module, name: str) -> bool:
    """Return whether a name is a module's class, and bound nowhere else."""
    return isinstance(_bound(tree, name), ast.ClassDef)


def _bound(tree: ast.Module, name: str) -> ast.AST | None:
    """Return the one place where a name is bound; None: there are several, or none."""
    found = [
        node
        for node in ast.walk(tree)
        if name == getattr(node, "name", None)  # of a function, a class, an import
        or (isinstance(node, ast.alias) and node.asname == name)
        or (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load))
    ]
    return found[0] if len(found) == 1 else None


def _signature(args: ast.arguments) -> Signature:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    kinds = [Parameter.POSITIONAL_ONLY] * len(args.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(args.args)
    parameters = [_parameter(one, kind, value) for one, kind, value in zip(positional, kinds, defaults, strict=True)]
    parameters += [_parameter(args.vararg, Parameter.VAR_POSITIONAL, None)] if args.vararg else []
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(_parameter(one, Parameter.KEYWORD_ONLY, default))
    parameters += [_parameter(args.kwarg, Parameter.VAR_KEYWORD, None)] if args.kwarg else []
    return Signature(parameters)


def _parameter(arg: ast.arg, kind: "inspect._ParameterKind", default: ast.expr | None) -> Parameter:
    return Parameter(arg.arg, kind, default=Parameter.empty if default is None else default)
