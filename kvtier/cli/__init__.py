"""Commands: `kvtier` (main.py), and what stands behind `scripts/serve` and `scripts/quickstart`."""
