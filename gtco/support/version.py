"""gtco's version: the one place that setup.py, ``gtco --version`` and the artifacts read."""

__version__ = "0.1.0"
