"""Emits loops: the emitter, and the expressions and loops that several sketches use."""
