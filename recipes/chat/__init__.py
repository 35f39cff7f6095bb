"""Conversations for language models: rows of many layouts, chat templates, what is learnt."""
