"""The launchers that an agent serves: its owner, which started it, and others of the node, which found it running.

One `kcoord exec` for each task of a node (``srun --ntasks-per-node=8 kcoord exec -- …``) is the usual case: the first one starts
the agent, and may well be the first to end. The agent ends with the last of them. Not guaranteed: that the successor of a killed
agent knows of the others.
"""

from __future__ import annotations


class Launchers:
    """Those who keep the agent alive: its owner, if it is `owned`, and launchers that attend."""

    def __init__(self, owned: bool) -> None:
        self._owner_is_here, self._ownerless = owned, not owned
        self._others: set[int] = set()  # connections of the launchers that attend
        self._leaving: set[int] = set()  # those among them that are ending

    @property
    def handed_over(self) -> bool:
        """True once the owner has left the agent to others."""
        return not (self._ownerless or self._owner_is_here)

    def attend(self, connection: int) -> None:
        self._others.add(connection)

    def leaves(self, connection: int) -> bool:
        """The launcher with this `connection` ends. True if none stays: of several that end at once, for the last one alone."""
        if connection in self._others:
            self._leaving.add(connection)
        return not self._owner_is_here and self._others <= self._leaving | {connection}

    def owner_leaves(self) -> bool:
        """The owner ends, or has ended. True: the agent goes on for others. False: there are none, or they end, too."""
        stays = not self._others <= self._leaving
        if stays:
            self._owner_is_here = False
        return stays

    def gone(self, connection: int) -> bool:
        """True if the owner and all others have gone now: the agent ends. Never of an agent that has no owner."""
        if connection not in self._others:
            return False
        self._others.remove(connection)
        self._leaving.discard(connection)
        return self.handed_over and not self._others
