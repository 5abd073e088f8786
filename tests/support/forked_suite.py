"""The conformance suite for backends, whose processes are forked with the compiler imported: seconds of CPU less for each."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

from kcoord.testing.backends import BackendSuite
from tests.support.shared_servers import fork_server


class ForkedSuite(BackendSuite):
    preload: ClassVar[tuple[str, ...]]
    """Modules that take long to import."""

    def python(self, arguments: Sequence[str], environ: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
        server = fork_server(self.preload)
        if not server.serves(environ):
            return super().python(arguments, environ, cwd)
        return cast("subprocess.Popen[str]", server.start(arguments, environ, cwd))  # it has the methods that are used
