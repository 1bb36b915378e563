"""Element-wise operators and data movement."""
