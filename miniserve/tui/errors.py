"""What can go wrong between the chat and a server, in words that the user reads."""

from __future__ import annotations


class ChatError(Exception):
    """What the user must read; the message says what to do."""


class NotYetError(Exception):
    """The server cannot answer now; worth another try."""
