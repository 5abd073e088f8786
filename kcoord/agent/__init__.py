"""The node's one kcoord process, and how ranks speak to it."""
