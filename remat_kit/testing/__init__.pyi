from .baseline import MemoryBaseline as MemoryBaseline
from .checks import CheckError as CheckError
from .checks import assert_fits as assert_fits
from .checks import assert_peak_at_most as assert_peak_at_most
from .equivalence import assert_equivalent as assert_equivalent
