"""Relax to the canonical graph: one walk, and a module of rules for each kind of operator."""
