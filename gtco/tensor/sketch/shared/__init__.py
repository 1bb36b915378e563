"""Loops, decisions and prices that several families share."""
