"""The learning study: where sharing rollouts wins, ties and loses, with tiny models on a CPU."""
