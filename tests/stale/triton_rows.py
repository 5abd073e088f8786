"""The rows of Triton, for the Triton that is installed."""

from __future__ import annotations

from tests.stale.triton_functions import ROWS as FUNCTIONS
from tests.stale.triton_surroundings import ROWS as SURROUNDINGS
from tests.stale.triton_values import ROWS as VALUES

ROWS = [*VALUES, *FUNCTIONS, *SURROUNDINGS]
