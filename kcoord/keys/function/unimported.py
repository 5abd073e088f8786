"""Modules that code imports when it runs, and that are not imported yet: what their text says. Nothing of it runs for a key.

A plain module, of functions, constants and imports, is stood in for by its functions and constants: the key is the same before
and after the import. Of any other module the whole file counts, and what the functions that are called read of further modules.
The process that imports it then has another key, and compiles once more.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from kcoord.interruption import let_through
from kcoord.keys.function.reads import imports_of, stores_of

_HIDDEN = "__kcoord_unimported__"


@dataclass(frozen=True)
class Imported:
    """The value of a name that an import statement binds: a module, or its attribute."""

    module: str
    attribute: str = ""


@dataclass(frozen=True, eq=False)
class Text:
    """Code of a module that is not plain: its file by content, and a function for what the code reads.

    `imported` counts, too: names that several import statements bind, and modules whose names ``import *`` takes. `whole` is the
    code that runs at the import, if this code depends on that: it is decorated, say.
    """

    function: types.FunctionType
    digest: str
    imported: tuple[Imported, ...] = ()
    whole: Text | None = None


class Unimported(types.ModuleType):
    """Stands for a module. Its attributes are the names that it binds: functions and constants if it is plain, else `Text`.

    If it is not plain `file` counts, and for any other name `whole`, the code that runs at the import.
    """

    __slots__ = ("file", "is_plain", "whole")

    is_plain: bool
    file: Text
    whole: Text


def changed_files(files: Mapping[str, str]) -> list[str]:
    """Those of `files`, each with the digest that a `Text` had, that are not as they were."""
    return [file for file, digest in files.items() if _digest(file) != digest]


def _digest(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def stand_in_of(namespace: Mapping[str, Any]) -> Unimported | None:
    """The stand-in whose functions have these globals."""
    return namespace.get(_HIDDEN)


def stand_in(name: str) -> Unimported | None:
    """A stand-in for the module of this name; None if there is no such file."""
    found = _find(name)
    if found is None:
        return None
    file, places = found
    try:
        content = b"" if file is None else Path(file).read_bytes()
    except OSError:
        return None
    try:
        text = importlib.util.decode_source(content)
        tree, code = ast.parse(text), compile(text, file or "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):  # an extension module, say
        tree, code = ast.parse("[None]"), compile("", file or "", "exec", dont_inherit=True)
    module = Unimported(name)
    space, digest = vars(module), hashlib.sha256(content).hexdigest()
    package = name if places is not None else name.rpartition(".")[0]
    space |= {"__package__": package, "__builtins__": vars(builtins), "__file__": file, _HIDDEN: module}
    space |= {"__path__": places} if places is not None else {}
    nothing = compile("", code.co_filename, "exec", dont_inherit=True)
    module.file = Text(types.FunctionType(nothing, space, "<file>"), digest)
    once, others = _imports(tree, code, package)
    inner = (isinstance(each, types.CodeType) and not each.co_name.startswith("<") for each in code.co_consts)
    runs = code.replace(co_consts=tuple(None if i else c for i, c in zip(inner, code.co_consts, strict=True)))
    module.whole = Text(types.FunctionType(runs, space, "<module>"), digest, others)
    plain = _plain(tree, code, space)
    module.is_plain = plain is not None
    space |= _texts(tree, code, module) if plain is None else plain
    space |= once
    return module


def _imports(tree: ast.Module, code: types.CodeType, package: str) -> tuple[dict[str, Imported], tuple[Imported, ...]]:
    """The names that import statements alone bind, to one thing; and what else is imported."""
    stores, bound = stores_of(code), imports_of(code)
    found: dict[str, list[Imported | None]] = {}
    for name, read in bound:
        found.setdefault(name, []).append(_imported(read.name, read.path, package))
    once = {
        n: each[0]
        for n, each in found.items()
        if len(set(each)) == 1 and each[0] is not None and stores[n] == len(each)
    }
    others = [each for name, several in found.items() if name not in once for each in several]
    others += [_imported("." * n.level + (n.module or ""), (), package) for n in _stars(tree)]
    return once, tuple(each for each in others if each is not None)


def _texts(tree: ast.Module, code: types.CodeType, module: Unimported) -> dict[str, Text]:
    """The functions and classes of a module that is not plain."""
    alone = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _is_simple(node)}
    alone -= {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    stores, found = stores_of(code), {}
    for each in code.co_consts:
        if isinstance(each, types.CodeType) and not each.co_name.startswith("<"):
            is_alone = each.co_name in alone and stores[each.co_name] == 1
            function = types.FunctionType(each, vars(module))
            function.__name__ = function.__qualname__ = f"<{each.co_name}>"  # no name of what there is after the import
            found[each.co_name] = Text(function, module.file.digest, whole=None if is_alone else module.whole)
    return found


def _find(name: str) -> tuple[str | None, list[str] | None] | None:
    """The file of a module, and the places of a package's modules. Its parents are not imported for that."""
    parent, _, last = name.rpartition(".")
    path: list[str] | None = None
    try:
        if not parent:
            spec = importlib.util.find_spec(name)
        else:
            known = sys.modules.get(parent)
            above = (None, list(vars(known).get("__path__") or ())) if known is not None else _find(parent)
            path = above[1] if above is not None else None
            spec = PathFinder.find_spec(name, path) if path else None
    except KeyError:  # a namespace package below a parent that is not imported
        return None, [str(each) for place in path or () if (each := Path(place, last)).is_dir()]
    except Exception as error:  # noqa: BLE001 - a finder of the program's may raise anything
        let_through(error)
        return None
    if spec is None:
        return None
    places = spec.submodule_search_locations
    return (spec.origin if spec.has_location else None), (None if places is None else list(places))


def _imported(module: str, path: tuple[str, ...], package: str) -> Imported | None:
    try:
        return Imported(importlib.util.resolve_name(module, package or None), *path[:1])
    except (ImportError, ValueError):
        return None


def _stars(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield node


def _plain(tree: ast.Module, code: types.CodeType, space: dict[str, Any]) -> dict[str, Any] | None:
    """The functions and constants of a module whose text alone tells what its names are bound to; None for any other."""
    codes = {each.co_name: each for each in code.co_consts if isinstance(each, types.CodeType)}
    lazy = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
    values: dict[str, Any] = {}
    bound: list[str] = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound += [each.asname or each.name.partition(".")[0] for each in node.names]
        elif isinstance(node, ast.FunctionDef) and _is_simple(node) and node.name != "__getattr__":
            values[node.name] = _function(node, codes[node.name], space, lazy)
            bound.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_literal(node.value):
            bound += [each.id if isinstance(each, ast.Name) else "*" for each in node.targets]
            values |= dict.fromkeys(bound[-len(node.targets) :], ast.literal_eval(node.value))
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return None
    moves = any(isinstance(node, ast.Global) for node in ast.walk(tree))
    return None if moves or "*" in bound or len(set(bound)) < len(bound) else values


def _is_simple(node: ast.FunctionDef) -> bool:
    """True if a function is what its text says, wherever it is defined."""
    defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    return not node.decorator_list and not getattr(node, "type_params", ()) and all(map(_is_literal, defaults))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _function(node: ast.FunctionDef, code: types.CodeType, space: dict[str, Any], lazy: bool) -> types.FunctionType:
    defaults = tuple(map(ast.literal_eval, node.args.defaults))
    function = types.FunctionType(code, space, node.name, defaults or None)
    only = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    function.__kwdefaults__ = {a.arg: ast.literal_eval(d) for a, d in only if d is not None} or None
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    notes = {each.arg: each.annotation for each in arguments if each is not None} | {"return": node.returns}
    function.__annotations__ = {
        name: value
        for name, note in notes.items()
        if note is not None and (value := ast.unparse(note) if lazy else _annotation(note, space)) is not _UNKNOWN
    }
    return function


_UNKNOWN: Any = object()


def _annotation(note: ast.expr, space: dict[str, Any]) -> Any:
    """A constant or a class. Others do not count, or make another key than after the import."""
    if isinstance(note, ast.Constant):
        return note.value
    if isinstance(note, ast.Attribute):
        return getattr(_annotation(note.value, space), "__dict__", {}).get(note.attr, _UNKNOWN)
    if not isinstance(note, ast.Name):
        return _UNKNOWN
    value = space.get(note.id, vars(builtins).get(note.id, _UNKNOWN))
    if isinstance(value, Imported):
        module = sys.modules.get(value.module, _UNKNOWN)
        return getattr(module, "__dict__", {}).get(value.attribute, _UNKNOWN) if value.attribute else module
    return value
