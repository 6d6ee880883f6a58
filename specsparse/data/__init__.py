"""Prompts that travel with the project, and readers of those that do not."""
