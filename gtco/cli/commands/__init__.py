"""The commands of ``gtco``, one a file."""
