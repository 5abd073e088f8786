"""The declaration of `mini` for kcoord. Launchers read it on machines without `mini`."""

from kcoord.backends import Compiler

COMPILER = Compiler("mini", backend="kcoord_mini:backend", modules={"mini": "kcoord_mini"})
