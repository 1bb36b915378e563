"""Measures on the machines of a Ray cluster. ``docs/farm.md`` says how a farm is made, and who may
reach it.

:mod:`~gtco.tuning.farm.connection` is the only module here that knows Ray,
:mod:`~gtco.tuning.farm.machine` is what runs on a machine of the farm, and
:mod:`~gtco.tuning.farm.runner` hands candidates to the machines.
"""
