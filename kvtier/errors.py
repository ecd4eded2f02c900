"""The error tree of kvtier.

Every operating error that kvtier raises on purpose derives from `KvtierError`; a bug is an `assert` and stays uncaught.
Texts name the field, the limit and the value, never a filesystem path of the host once they may reach a client:
`InvalidRequest` and `Unavailable` are the only two that cross the wire.
"""

from __future__ import annotations


class KvtierError(Exception):
    """Root of everything kvtier raises on purpose."""


class ConfigError(KvtierError):
    """A configuration key is unknown, malformed or does not fit this machine; the text names key, value and way out."""


class CheckpointError(KvtierError):
    """A model folder is missing, incomplete, of an unsupported kind, or does not match its own config."""


class RequestError(KvtierError):
    """A request is answered with an error; the engine goes on. Never raised itself, only through its kinds."""


class InvalidRequest(RequestError):
    """The client sent something impossible (INVALID_ARG on the wire)."""


class Unavailable(RequestError):
    """The engine cannot take or finish the request now (UNAVAILABLE on the wire)."""


class ShelfError(KvtierError):
    """A shelf could not be opened or has to be left: the engine runs on without it. Misses are outcomes, not errors."""
