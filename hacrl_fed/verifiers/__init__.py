"""Verifiers: what a completion is worth."""
