"""The learned cost model: features of built programs, the model, evolutionary search."""
