"""Failed assertions of the matrix show what they compared."""

import pytest

pytest.register_assert_rewrite("tests.stale.matrix")
