"""The figures: by what was measured before, measured now, whole models, ablations."""
