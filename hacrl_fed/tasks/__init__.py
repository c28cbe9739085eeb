"""Tasks: prompts with gold answers, their order in a run, and how they are rendered for a model."""
