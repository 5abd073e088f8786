"""Access to a profile: in the store, or in the agent's copy: of a process that sees no store, and where signatures are required.

Only the agent has the signing keys, and a profile names functions that are imported and called.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

from kcoord.errors import StoreError
from kcoord.packs.recipe import Recipe
from kcoord.packs.recipe_files import load_profile
from kcoord.protocol.messages import Profile, ProfileState
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_PATIENCE = 30.0  # seconds; the agent reads the store, which may hang


def recorded(settings: Settings, name: str, notices: Notices | None = None) -> list[Recipe]:
    """The recipes of the profile `name`, as `load_profile` sorts them, from where this process may read them.

    Raises `KcoordError` if there is no such profile. Blocks for as long as the file system does.
    """
    return load_profile(readable(settings, name), name, notices)


def readable(settings: Settings, name: str) -> Settings:
    """`settings` for reading the profile `name`; without the store if this process must not read it there.

    Asks a running agent, and starts none. Waits as long as the agent says that it is still reading. Raises `StoreError` after
    `_PATIENCE` seconds.
    """
    with closing(AgentClient(settings, Notices())) as client:
        request, deadline = Profile(name, sees_store=settings.store is not None), time.monotonic() + _PATIENCE
        answer = client.ask(request, ProfileState, quietly=True, start=False)
        while answer is not None and answer.late:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the agent has not read the profile {name!r} within {_PATIENCE:g} s: does the store hang?"
                )
            answer = client.ask(request, ProfileState, quietly=True, start=False)
    mounted = settings.as_mounted()
    keys = mounted.signing_key_file is not None or mounted.signing_key is not None
    checked = answer is not None and answer.checked
    checked = checked or (settings.trust == "require" and not keys)
    return replace(settings, store=None, trust="require") if checked else settings
