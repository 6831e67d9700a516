"""Numbers that all processes must settle on."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def least(value: int) -> int:
    """The smallest `value` of all processes; they must all ask."""
    if jax.process_count() == 1:
        return value
    return int(np.min(multihost_utils.process_allgather(np.int32(min(value, 2**31 - 1)))))
