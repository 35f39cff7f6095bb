"""Tasks: model + data + loss + evaluation. Each is a plug-in that the trainer finds by entry point."""
