"""Choices that all ranks of a job make alike: the winner of an autotuning, and the timings before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kcoord.artifacts import choices, local
from kcoord.artifacts.local import Artifact
from kcoord.errors import ArtifactInvalid, ProtocolError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.recipe import Recipe, choice_recipe
from kcoord.protocol.fields import carried
from kcoord.protocol.messages import Choice, Lookup, Measure, Measurements, Offer, Request
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


class Choices:
    """`usable`, `find` and `record` are those of the `Coordinator`. No fault comes through here. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        client: AgentClient,
        notices: Notices,
        usable: Callable[[], bool],
        find: Callable[[CacheKey, Path], Artifact | None],
        record: Callable[[Recipe], None],
    ) -> None:
        self._settings, self._client, self._notices = settings, client, notices
        self._usable, self._find, self._record = usable, find, record

    def get(self, key: CacheKey) -> bytes | None:
        """The content that the first rank offered for `key`; None if there is none, or the agent cannot tell.

        Waits for no other rank; for the agent and the store, seconds at most. The content is untrusted.
        """
        if not self._usable():
            return None
        homes = [choices.store_decided(self._settings.local_dir, key.digest)]
        if self._settings.store is None:
            homes.append(choices.node_decided(self._settings.local_dir, key.digest))
        for home in homes:
            artifact = self._find(key, home)
            if artifact is not None:
                try:
                    content = choices.content_of(key.name, local.read_contents(artifact))
                except ArtifactInvalid as error:
                    let_through(error)
                    self._notices.tell(f"{error}; it is ignored")
                    return None
                return self._recorded(key, content, artifact.manifest.compile_seconds)
        return self._recorded(key, self._choice(Lookup(key.digest)), 0.0)

    def offer(self, key: CacheKey, content: bytes, seconds: float, device: str = "") -> bytes | None:
        """Offer `content` as the choice for `key`; returns the one that holds from now on, here and wherever the store is read.

        That is `content`, or an earlier offer of another rank. None: nothing is kept, and the choice is this process's own.
        `seconds` is the time that choosing took. Not guaranteed: that nodes agree which have no store in common, or whose store
        does not answer.
        """
        if not self._usable():
            return None
        if len(content) > choices.LARGEST_CHOICE:
            self._notices.tell(f"{key.name}: a choice of {len(content)} bytes is too large to be shared")
            return None
        try:
            return self._recorded(key, self._choice(Offer(carried(key), content, seconds, device)), seconds)
        except ProtocolError as error:
            self._notices.tell(f"{key.name} is not shared: {error}")
            return None

    def next_measurement(
        self, digest: str, count: int, index: int | None = None, timing: bytes | None = None
    ) -> Measurements | None:
        """Of `count` configurations, the one to measure next; or all that this node's ranks measured of what has this `digest`.

        `timing` is what this process has just measured of number `index`. None: nobody shares measurements. Waits for no rank.
        Others' timings are untrusted.
        """
        if not self._usable():
            return None
        return self._client.ask(Measure(digest, count, index, timing), Measurements)

    def _choice(self, request: Request) -> bytes | None:
        answer = self._client.ask(request, Choice)
        return None if answer is None else answer.content

    def _recorded(self, key: CacheKey, content: bytes | None, seconds: float) -> bytes | None:
        """`content`, which is in the job's profile from now on."""
        if content is not None and self._settings.recorded_as is not None:
            recipe = choice_recipe(key, content, seconds)
            if recipe is not None:
                self._record(recipe)
        return content
