"""What kinds that decode share: prompts decoded by several methods in turn, what those cost, what came of it."""
