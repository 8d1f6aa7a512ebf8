"""Chats: their messages (`messages`), a template's text of them (`template`), tokens (`chats`)."""
