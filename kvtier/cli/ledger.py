"""Long prompts for the quickstart: the records of an invented warehouse, the same every time.

Made of plain English by arithmetic, so that nothing has to be shipped or fetched. Knows no tokenizer; a test holds how
many tokens the texts have with SmolLM2.
"""

from __future__ import annotations

GOODS = (
    "copper wire",
    "oak planks",
    "glass jars",
    "wool blankets",
    "brass hinges",
    "green tea",
    "candles",
    "roof tiles",
)
SUPPLIERS = ("Alder and Sons", "the Lindgren mill", "Harbour Trading", "Mrs. Okafor", "the Weir cooperative")
MONTHS = ("January", "March", "April", "June", "August", "October", "November")
NOTE = "Note: the keeper of the keys is Matilda Fenwick, and the night guard is called Oskar."
QUESTION = "What is the name of the night guard?"
LINES_AFTER_NOTE = 6


def ledger(name: str, shelves: int) -> str:
    """The records of the warehouse `name`, one line a shelf, a note among the last, and a question about it.

    Texts of different names differ from the first word on, so that no block of one is a block of another.
    """
    seed = sum(name.encode())
    lines = [_line(seed, shelf) for shelf in range(1, shelves + 1)]
    lines.insert(-LINES_AFTER_NOTE, NOTE)
    return "\n".join([f"{name} warehouse, stock list.", *lines, "", QUESTION])


def _line(seed: int, shelf: int) -> str:
    key = seed * 31 + shelf * 17
    goods, supplier, month = GOODS[key % 8], SUPPLIERS[key // 3 % 5], MONTHS[key // 5 % 7]
    return f"Shelf {shelf} holds {2 + key % 61} crates of {goods}, delivered on {1 + key % 28} {month} by {supplier}."
