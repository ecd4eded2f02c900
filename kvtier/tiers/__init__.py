"""The memory of the tiers: the HBM arena (hbm), slabs of shelves (slab) and the header of every row in them (header)."""
