"""Triton-language programs are run by their interpreter in all tests, on any machine."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # looked at when triton is first imported, which may be by any test
