"""What scenarios and their table both speak of."""

from __future__ import annotations

Numbers = dict[str, object]
"""What a scenario has counted and measured: numbers and short texts, fit for JSON."""
