"""Less of what the product logs: a scenario makes the same trouble hundreds of times. Used by the soak scenarios."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(level: int) -> Iterator[None]:
    """Nothing below `level` is logged meanwhile."""
    logger = logging.getLogger("kvtier")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
