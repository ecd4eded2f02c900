"""Starting, watching and stopping the real Triton server around the engine. Knows no torch and no engine.

`scripts/serve` (kvtier.cli.serve) is the command; tests and the quickstart use `TritonServer` as a context manager.
"""

from kvtier.serving.errors import ServingError
from kvtier.serving.locate import Installation, locate
from kvtier.serving.server import Ports, ServerOptions, TritonServer
from kvtier.serving.watch import Watch

__all__ = ["Installation", "Ports", "ServerOptions", "ServingError", "TritonServer", "Watch", "locate"]
