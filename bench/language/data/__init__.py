"""The data: workloads, their stages, sentences about them, rankings of configs."""
