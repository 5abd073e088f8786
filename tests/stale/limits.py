"""The limits of keys: what a change of is not seen. Each is a sentence of docs/keys.md, with the rows that show it."""

from __future__ import annotations

LIMITS = {
    "Names that the program computes": (
        "a module's constants by dir()",
        "the subclasses of a class",
        "type hints that are written as text",
    ),
    "The order of a dict's entries, and whether two names hold one object": (
        "the order of a dict",
        "the order of a dict that is given",
        "which of two lists in a list that is given are one",
        "which two of three lists are one",
        "whether two names hold one list",
        "the sign of a number that is none",
    ),
    "What the program remembers": ("what load makes of the inner artifact",),
    "The state of installed packages and of Python's own modules": (
        "a constant of Python's that a function of Python's reads",
        "a method of Python's class that the program replaces",
        "the level of a logger",
    ),
    "Files that nobody declared": (
        "a file that is loaded by its path in the function",
        "a module that appears where an import of the function failed",
        "a file in a directory that is named as a cache of Python's",
        "a file in a directory that is named as one of a version control",
        "an empty directory of a tree",
        "whether a file of a tree may be executed",
    ),
    "Changes, in the running process, of what Python keeps frozen or derives": (
        "what dataclasses.replace replaces in a global object",
        "a default of a dataclass's field",
        "a default factory that is a lambda",
        "the metadata of a dataclass's field",
        "the names of a dataclass's fields",
        "a default of a named tuple's field",
        "an attribute of an enum's member beside its value",
        "the value of an enum's member",
        "the order of an enum's members",
        "a helper's annotations",
        "a helper's signature",
    ),
}
BEYOND = {row: limit for limit, rows in LIMITS.items() for row in rows}

COMPILED_AGAIN = {"which branch of the function imports"}
"""Rows whose function is compiled once more in a process that has imported other modules since its first compile."""
