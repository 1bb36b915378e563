"""Rewrites of quantized models: products of integers, and quantizing and dequantizing beside
them.
"""
