"""Any single operator: slow, and always there."""
