"""What a training step costs: ours beside TRL's, and both beside what the machine could do."""
