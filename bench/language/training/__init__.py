"""The model in torch, its training, and the loop that measures and trains in turns."""
