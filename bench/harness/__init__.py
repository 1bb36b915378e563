"""Times systems side by side: workloads, peers, processes, rounds, tables."""
