"""Stages around one reduction: normalisation, softmax, sums, extremes."""
