"""How argparse shows the descriptions and epilogs of scripts: prose as wide as the terminal, examples as they are."""

from __future__ import annotations

import argparse
import textwrap


class Paragraphs(argparse.RawDescriptionHelpFormatter):
    """Fills each paragraph but those with lines that are indented, such as lists and examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(self._paragraph(part, width, indent) for part in text.strip("\n").split("\n\n"))

    def _paragraph(self, text: str, width: int, indent: str) -> str:
        if any(line.startswith(" ") for line in text.splitlines()):
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
