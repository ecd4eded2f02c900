"""Moving bytes: the I/O contract (base), the thread-pool engine (threads) and the seam for faults (faulty)."""
