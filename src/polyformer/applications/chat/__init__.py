"""Conversations with chat models."""

from polyformer.applications.chat.conversation import Conversation, ending_turns, template_of

__all__ = ["Conversation", "ending_turns", "template_of"]
