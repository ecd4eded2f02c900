"""Text in and out: tokenizer, chat template, incremental detokenizer, stop strings.

Owns everything between a client's text and token ids. Knows no model, tensor, tier or Triton server. The engine
encodes prompts with `encode_prompt` and turns each sequence's tokens into text with one `TextStream`.
"""

from kvtier.tokens.chat_template import ChatTemplate, RenderLimits, checked_messages
from kvtier.tokens.detokenizer import Detokenizer
from kvtier.tokens.stops import StopMatcher
from kvtier.tokens.stream import TextStream
from kvtier.tokens.tokenizer import Tokenizer, encode_prompt

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "RenderLimits",
    "StopMatcher",
    "TextStream",
    "Tokenizer",
    "checked_messages",
    "encode_prompt",
]
