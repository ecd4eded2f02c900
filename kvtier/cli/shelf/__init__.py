"""`kvtier shelf`: looks at the shelves of a cache directory and acts on them, while servers run and when none does.

looking (ls, stat, verify), changing (clear, warm, pin, unpin, stop), options, view (tables and JSON), work (walks over
rows), main (puts them together).
"""
