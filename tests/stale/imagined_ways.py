"""How a row that was imagined is compiled: as any row of the generic API."""

from __future__ import annotations

from tests.stale.generic_ways import WAYS as WAYS
from tests.stale.generic_ways import device as device
from tests.stale.imagined_arguments import ROWS as ARGUMENTS
from tests.stale.imagined_classes import ROWS as CLASSES
from tests.stale.imagined_functions import ROWS as FUNCTIONS
from tests.stale.imagined_modules import ROWS as MODULES
from tests.stale.imagined_surroundings import ROWS as SURROUNDINGS
from tests.stale.imagined_twins import ROWS as TWINS
from tests.stale.imagined_values import ROWS as VALUES

ROWS = [*ARGUMENTS, *CLASSES, *FUNCTIONS, *MODULES, *TWINS, *VALUES, *SURROUNDINGS]
