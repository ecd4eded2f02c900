"""Long proofs of the shared shelves, in one form for both who run them: `scripts/soak` and the fault tests.

Each is a `Scenario` of table.py: counts, a seed and a scratch folder in; numbers out, or AssertionError.
"""
