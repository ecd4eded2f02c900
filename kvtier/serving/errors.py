"""The one error of kvtier.serving."""

from kvtier.errors import KvtierError


class ServingError(KvtierError):
    """The Triton server cannot be started or reached; the text says what is wrong and what to do."""
