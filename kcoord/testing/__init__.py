"""Conformance suites: pytest classes to inherit, one for each interface that others may implement. They need pytest, which kcoord
itself does not.
"""

import sys

from kcoord.testing.subject import Subject as Subject
from kcoord.testing.subject import main as main

if "pytest" in sys.modules:  # failures of the suites show values, as those of a test module do
    sys.modules["pytest"].register_assert_rewrite(
        "kcoord.testing.backends", "kcoord.testing.leases", "kcoord.testing.stores"
    )
