"""Rewrites from Graph to Graph, one per file; ``canonicalize`` runs them in order."""

from gtco.graph.rewrites.pipeline import PIPELINE, canonicalize

__all__ = ["PIPELINE", "canonicalize"]
