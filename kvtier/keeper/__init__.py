"""The keeper: one small process for each cache directory, that keeps the books of the shelves that engines share.

wire (messages), server and ledger (its side), client and shared (an engine's side), spawn, owners, slot_table, opening.
Bytes of rows never pass through it; its absence, slowness or death is a miss.
"""
