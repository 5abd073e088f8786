"""Choices in profiles: recorded with their keys, they hold for whoever asks for these keys, and need no compiler.

The key tells all that a choice depends on: one for a kernel that has changed since is never asked for.
"""

from __future__ import annotations

import re

from kcoord.artifacts.choices import LARGEST_CHOICE
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.recipe import Recipe

KIND = "choice"
"""The `backend` of such recipes."""
_NOT_IN_A_NAME = re.compile(r"\W+")


def choice_recipe(key: CacheKey, content: bytes, seconds: float) -> Recipe | None:
    """The recipe of the choice `content` for `key`; None if it is too large, or has no name."""
    call = {"key": [key.backend, key.name, [factor.to_wire() for factor in key.factors]], "content": content}
    return Recipe.of(KIND, key.backend, _NOT_IN_A_NAME.sub("_", key.name), call, None, seconds)


def choice_in(recipe: Recipe) -> tuple[CacheKey, bytes]:
    """The key, and the content. Raises ValueError unless `choice_recipe` could have returned `recipe`, which is untrusted."""
    try:
        (backend, name, factors), content = recipe.call["key"], recipe.call["content"]
        key = CacheKey.from_wire({"backend": backend, "name": name, "factors": factors, "details": []})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{recipe.qualname} is no choice: {error}") from error
    if not isinstance(content, bytes) or len(content) > LARGEST_CHOICE:
        raise ValueError(f"{recipe.qualname} is no choice")
    return key, content
