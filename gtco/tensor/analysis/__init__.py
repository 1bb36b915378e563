"""What a stage computes, whatever machine it runs on: contraction and window views, index maps,
groups of axes, chains of operators around an anchor, and the one probe that says how tensors lie in
memory. Nothing in here emits code (``tests/project/test_layers.py`` holds it); a :class:`Scope` is
all it knows of loops.
"""
