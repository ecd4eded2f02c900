"""Decoders: what a checkpoint says (`config`, `rope`), its tensors (`weights`) and the forward pass (`decoder`).

Knows nothing of tiers, sequences or requests. The engine loads one decoder and its runner calls it.
"""
