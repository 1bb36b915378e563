"""Tests of gtco/report: facts, pages, and pages in a browser."""
