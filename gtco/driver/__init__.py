"""Takes models through the steps of a compile, in order, and back to the caller."""
