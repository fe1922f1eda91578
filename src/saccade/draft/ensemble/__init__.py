"""Ensemble of draft views, weighted by their recent agreement with the target (TABED)."""
