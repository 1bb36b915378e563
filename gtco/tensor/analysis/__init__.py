"""The analysis of what a stage computes, independent of the machine: contraction and window views,
index maps, groups of axes, chains of operators around an anchor, and the one probe that finds how
tensors lie in memory. Nothing in here emits code (``tests/project/test_layers.py`` checks it); a
:class:`Scope` is all it knows of loops.
"""
