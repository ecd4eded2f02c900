"""The memory of the tiers: arena (hbm), slabs of shelves (slab), row headers (header), free memory (memory)."""
