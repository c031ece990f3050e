"""Conversations as text: the chat templates of checkpoints, and their files."""

from polyformer.data.chat.template import ChatTemplate, Message, RenderedChat

__all__ = ["ChatTemplate", "Message", "RenderedChat"]
