"""``python -m kcoord``: the kcoord command."""

from kcoord.cli import main

main()
